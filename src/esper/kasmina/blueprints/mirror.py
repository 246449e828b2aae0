"""Two branches that cancel at birth.

A delta must start at exactly zero. A last layer of zeros does that too, but then the layers before it
see a gradient only after it has moved, and a small one: the learning rate times a gradient squared.
Here nothing is zero but the sum, so every weight learns from the first backward.
"""

import copy

import torch
from torch import Tensor, nn


class Mirrored(nn.Module):
    """one(h) + other(h), where ``other`` starts as ``one`` with the sign of its last layer turned.

    Rounding is symmetric in the sign, so the sum is zero bit for bit. The branches part at the first
    step: their last layers receive the same gradient, the layers before them opposite ones. Dropout
    would draw another mask for each branch and is no layer for this.
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
