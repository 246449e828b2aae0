"""Two branches whose sum is zero at birth.

A delta must start at exactly zero. With a last layer of zeros the layers before it would receive no gradient
in the first step and a small one in the second. With two branches that cancel, only the sum is zero, and
every weight receives a gradient in the first backward pass.
"""

import copy

import torch
from torch import Tensor, nn


class Mirrored(nn.Module):
    """Sum one(h) + other(h); ``other`` starts as a copy of ``one`` with the negated last layer.

    Rounding is symmetric in the sign, so the sum is zero bit for bit. The branches differ after the first
    step: their last layers receive the same gradient, the layers before them opposite ones. Layers must not
    contain dropout, which would draw a different mask for each branch.
    """

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.one = nn.Sequential(*layers)
        self.other = copy.deepcopy(self.one)
        with torch.no_grad():
            for weight in self.other[-1].parameters():
                weight.neg_()

    def forward(self, h: Tensor) -> Tensor:
        delta: Tensor = self.one(h) + self.other(h)
        return delta
