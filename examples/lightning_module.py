"""Grow a LightningModule under the Lightning `Trainer` with a callback.

python examples/lightning_module.py
"""

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from esper.lightning import GrowthCallback
from esper.tolaria.tasks.digits import load_digits


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 10)
        )

    def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], _index: int) -> Tensor:
        logits = self.net(batch[0])
        self.log("right", (logits.argmax(1) == batch[1]).float().mean(), prog_bar=True)
        return F.cross_entropy(logits, batch[1])  # growth decides by this loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits(torch.Generator().manual_seed(0))
    train = DataLoader(TensorDataset(digits.train.x, digits.train.y), batch_size=64, shuffle=True)
    val = DataLoader(TensorDataset(digits.validation.x, digits.validation.y), batch_size=120)

    growth = GrowthCallback(
        sample=digits.train.x[:2], net="net", slots=["1", "3"], controller="mlp@1:4,mlp@3:8"
    )
    module = Classifier()
    before = sum(p.numel() for p in module.parameters())
    trainer = Trainer(
        max_epochs=16,
        accelerator="cpu",
        callbacks=[growth],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, train, val)
    print(f"right {100 * trainer.callback_metrics['right']:.1f} %")

    net = growth.finish()
    print(f"{type(net).__name__}: {before:,} → {sum(p.numel() for p in net.parameters()):,} parameters")


if __name__ == "__main__":
    main()
