"""Grafts: seeds with their gates in the forward pass of a network.

Every blend operator has the form ``h + alpha * change(h)``. For a delta d the change is d (ADD), h·tanh(d)
(MULTIPLY) or g(h)·d (GATE), so it is exactly zero if d is zero. Because of the term h, the gradient into the
host upstream of a slot is non-zero at every alpha.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import BlueprintSpec, Topology
from esper.kasmina.random_streams import TorchStream
from esper.kasmina.sites import Site
from esper.leyline.factored_actions import BLEND_IDS, STYLE_OPERATORS, BlendOperator

SHADOW_MIN_SAMPLES: Final = 32
SHADOW_MIN_SHARE: Final = 0.25


def shadow_size(batch: int) -> int:
    """Return the number of samples on which an incubating seed trains, if the training batch has ``batch``
    samples."""
    return min(batch, max(SHADOW_MIN_SAMPLES, math.ceil(SHADOW_MIN_SHARE * batch)))


INITIAL_OPENING: Final = 1.0
"""Initial input of the sigmoid of a gate; the gate starts at sigmoid(1), about 0.73."""


class Participation(NamedTuple):
    """Settings of a seed for a forward pass, such as whether it is blended in and at which alpha."""

    active: bool = True
    """Whether the seed is blended into the features of the host."""
    alpha: Tensor | None = None
    """Alpha of the seed in the forward pass; None for the alpha that the graft stores."""
    taps: bool = False
    """Whether the slot stores features of some samples of a training batch, for the shadow branch."""
    ambient: bool = False
    """Whether the seed draws from the random stream that is active during the forward pass, not from its
    slot's stream."""


class Gate(nn.Module):
    """Gate: a learned factor between 0 and 1 for every position of the features.

    A gate starts constant, because random initial weights would take long to change: the gradient of a gate
    is proportional to the delta, which is zero at birth.
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
    """Return the change of the features ``h`` by a seed at alpha 1, in the shape of ``h``."""
    if torch.is_grad_enabled() and not h.requires_grad:
        # In torch 2.13 the backward pass of a channels_last GroupNorm crashes on the CPU if its parameters
        # require a gradient and its input does not, so the input gets a gradient too.
        h = h.detach().requires_grad_()
    return pure_change(operator, h, seed, gate)


def pure_change(operator: BlendOperator, h: Tensor, seed: nn.Module, gate: nn.Module | None) -> Tensor:
    """Return the change of the features ``h`` by a seed, in operations that ``torch.fx`` can trace."""
    delta: Tensor = seed(h)
    if operator is BlendOperator.ADD:
        return delta
    if operator is BlendOperator.MULTIPLY:
        return h * torch.tanh(delta)
    if gate is None:
        raise RuntimeError("the GATE operator needs a gate module")
    opening: Tensor = gate(h)
    return opening * delta


class Graft(nn.Module):
    """Seed with its gate and alpha; runs as a forward hook that returns ``h + alpha * change(h)`` for
    features ``h``.

    Args:
        site: Position of the slot in the network.
        spec: Blueprint of the seed.
        style: Index of the blend style.
        block: Module without slots that a copying blueprint copies; other blueprints ignore it.
    """

    alpha: Tensor
    description: Tensor
    participation: Participation
    features: Tensor | None

    def __init__(self, site: Site, spec: BlueprintSpec, style: int, block: nn.Module | None) -> None:
        super().__init__()
        self.site = site
        self.operator = STYLE_OPERATORS[style]
        self.seed = spec.build(block if spec.copies and block is not None else site.width)
        self.gate = Gate(site.width, site.topology) if self.operator is BlendOperator.GATE else None
        self.swap = None if spec.copies else site.swap
        """Axes to transpose before the seed receives the features; None for a copied block."""
        self.stream: TorchStream | None = None
        """Random stream for dropout in the seed; None for torch's global generator."""
        self.stochastic = False
        """Whether the seed draws random numbers in training mode."""
        # The gradient of the seed's input is computed only for seeds with an affine GroupNorm, which need it
        # (ADR 0006); on a frozen network it costs time.
        norms = any(isinstance(m, nn.GroupNorm) and m.affine for m in self.seed.modules())
        self.change = change if norms else pure_change
        # Alpha is a 0-d buffer and not a float, because torch.compile would recompile for every new float.
        self.register_buffer("alpha", torch.ones(()))
        # Blueprint and style are a buffer, so that they are part of every state dict.
        self.register_buffer("description", description_of(spec.name, style))
        self.features = None
        self.take_part(Participation())

    def take_part(self, participation: Participation) -> None:
        """Set how the seed takes part in later forward passes, for example at which alpha."""
        # Assigning through vars avoids nn.Module.__setattr__, which would search parameters and submodules at
        # every minibatch.
        vars(self)["participation"] = participation

    def on_forward(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Blend the seed into the output of the slot's submodule; this method is the forward hook."""
        part, where = self.participation, self.site.output
        h = output if where.holder == "tensor" else where.features(output)
        if part.taps and self.training:
            # The features at the slot are cloned, because an in-place activation downstream may overwrite
            # them.
            vars(self)["features"] = h.detach()[: shadow_size(len(h))].clone()
        if not part.active:
            return None
        grown = self.blended(h)
        return grown if where.holder == "tensor" else where.replaced(output, grown)

    def blended(self, h: Tensor) -> Tensor:
        """Return the features with the seed blended in, with the settings that ``take_part`` has stored."""
        part = self.participation
        if self.stochastic and self.training and self.stream is not None and not part.ambient:
            with self.stream:
                return self.forward(h, part.alpha)
        return self.forward(h, part.alpha)

    def forward(self, h: Tensor, alpha: Tensor | None = None) -> Tensor:
        """Return the features with the seed blended in, at the alpha that the graft stores unless one is
        given."""
        seen = h.transpose(*self.swap) if self.swap else h
        delta = self.change(self.operator, seen, self.seed, self.gate)
        weight = self.alpha if alpha is None else alpha
        # Under autocast a seed may return another dtype than the host's features.
        grown = torch.addcmul(seen, weight.to(seen.dtype), delta.to(seen.dtype))
        return grown.transpose(*self.swap) if self.swap else grown

    def floats(self) -> list[Tensor]:
        """Return every floating-point parameter and buffer of seed and gate."""
        tensors = (*self.parameters(), *self.buffers())
        return [tensor.detach() for tensor in tensors if tensor.is_floating_point()]


def description_of(blueprint: str, style: int) -> Tensor:
    """Encode blueprint and style as a tensor of bytes, because file formats for weights store tensors
    only."""
    return torch.tensor(list(json.dumps([blueprint, BLEND_IDS[style]]).encode()), dtype=torch.uint8)


def described(description: Tensor) -> tuple[str, int]:
    """Return the blueprint and the style index that a byte tensor of ``description_of`` encodes."""
    blueprint, style = json.loads(bytes(description.tolist()))
    return blueprint, BLEND_IDS.index(style)
