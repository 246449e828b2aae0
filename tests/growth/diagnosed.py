"""Small network and data for tests of ``esper.diagnose``."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def features(net: nn.Module, rng_seed: int = 0, samples: int = 512) -> tuple[Tensor, Tensor]:
    """Return inputs of five features, and two targets: sines of sums of the features."""
    x = torch.randn(samples, 5, generator=torch.Generator().manual_seed(rng_seed))
    return x, torch.sin(2 * torch.stack([x[:, :3].sum(1), x[:, 2:].sum(1)], 1))


def loaders(data: Callable[..., tuple[Tensor, Tensor]]) -> tuple[DataLoader[Any], DataLoader[Any]]:
    own = torch.Generator().manual_seed(5)
    train = DataLoader(TensorDataset(*data(None, 1)), batch_size=32, shuffle=True, generator=own)
    return train, DataLoader(TensorDataset(*data(None, 2, 256)), batch_size=64)


class Net(nn.Module):
    """Network of three linear layers with BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.1))
        self.second = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.second(F.relu(self.first(x)))))
