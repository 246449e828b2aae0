"""Train a policy on networks like yours, then let it grow one of them.

Run it as a program, or use its task from the command line:

    esper run --task examples.own_task:make_task --steps 6
    esper train --task examples.own_task:make_task --iterations 2 --envs 2
"""

import shutil
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.run.policy_training import train
from esper.simic.config import TrainingConfig
from esper.tolaria.tasks import TaskSpec, module_task, register_task


class MLP(nn.Module):
    """Too small on purpose: it has no activation, so it can only learn a linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)))


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(2048, 8, generator=torch.Generator().manual_seed(0))
    return x, x.abs().sum(dim=1, keepdim=True)


def make_task() -> TaskSpec:
    """State how to build the module, where its slots are, and the data."""
    return module_task(MLP, *make_data(), name="own_mlp", slots=["first", "second"], learning_rate=0.005)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path("runs/own_task")
    shutil.rmtree(folder, ignore_errors=True)
    register_task(make_task())
    train(TrainingConfig(task="own_mlp", envs=8, iterations=10, steps=6, evaluate_every=5), folder)

    x, y = make_data()
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    net = MLP()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.005)
    grown = esper.grow(
        net,
        loader,
        loader,
        loss=nn.functional.mse_loss,
        optimizer=optimizer,
        epochs=8,
        slots=["first", "second"],
        controller=folder / "best",
    )
    print(grown.summary())
