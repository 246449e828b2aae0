"""How a seed's delta joins the host's features.

Every operator is ``h + alpha * change(h)`` with a change that is exactly zero when the delta is:
ADD d, MULTIPLY h·tanh(d), GATE g(h)·d. The identity path keeps the gradient into the host upstream
of a slot alive at every alpha.
"""

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.registry import Topology
from esper.leyline.factored_actions import BlendOperator

INITIAL_OPENING = 1.0
"""Before the sigmoid: a gate starts about three quarters open."""


class Gate(nn.Module):
    """One opening in (0, 1) per position, learned with the seed.

    It starts as a constant. Its gradient is the delta's size, zero at birth, so weights of their own
    would drown what it learns first.
    """

    def __init__(self, width: int, topology: Topology) -> None:
        super().__init__()
        self.score = (
            nn.Conv2d(width, 1, kernel_size=1, bias=False)
            if topology == "feature_map"
            else nn.Linear(width, 1, bias=False)
        )
        nn.init.zeros_(self.score.weight)

    def forward(self, h: Tensor) -> Tensor:
        return torch.sigmoid(INITIAL_OPENING + self.score(h))


def change(operator: BlendOperator, h: Tensor, seed: nn.Module, gate: nn.Module | None) -> Tensor:
    """What full alpha would add to ``h``; same shape as ``h``."""
    if torch.is_grad_enabled() and not h.requires_grad:
        # A channels_last group norm on the CPU crashes the process in backward (torch 2.13) when its
        # parameters want a gradient and its input does not; the input's gradient is the price.
        h = h.detach().requires_grad_()
    return pure_change(operator, h, seed, gate)


def pure_change(operator: BlendOperator, h: Tensor, seed: nn.Module, gate: nn.Module | None) -> Tensor:
    """The same as operators alone, as ``torch.fx`` can trace it."""
    delta: Tensor = seed(h)
    if operator is BlendOperator.ADD:
        return delta
    if operator is BlendOperator.MULTIPLY:
        return h * torch.tanh(delta)
    if gate is None:
        raise RuntimeError("the GATE operator needs a gate module")
    opening: Tensor = gate(h)
    return opening * delta
