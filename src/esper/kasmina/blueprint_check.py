"""Check that a user's blueprint can be trained, by training a seed between two small layers.

Germination already refuses a seed that changes the shape of the features or whose delta is not zero at birth.
Function ``check_blueprint`` also trains a seed: every parameter must receive a gradient, and the output for a
token must not depend on later tokens.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.blueprints import Topology, blueprint_named
from esper.kasmina.host import Host
from esper.kasmina.incubation import shadow_loss
from esper.kasmina.network import MorphogeneticModel, slot_streams
from esper.kasmina.random_streams import TorchStream
from esper.kasmina.slot import SeedSlot
from esper.leyline import BLEND_IDS, STYLE_OPERATORS, BlueprintError, Stage

RNG_SEEDS: Final = range(5)
"""Rng seeds of the initial weights with which a blueprint is checked."""
LEAST_GRADIENT: Final = (1e-6, 1e-8)
"""Two numbers a and b: the gradient norm of a parameter tensor must be at least a · (norm of the tensor) + b.
"""

_CLASSES, _BATCH, _LENGTH, _INPUT = 4, 16, 6, 2
_SHAPES: Final[Mapping[Topology, tuple[int, ...]]] = {
    "feature_map": (_INPUT, _LENGTH, _LENGTH),
    "volume": (_INPUT, _LENGTH, _LENGTH, _LENGTH),
    "tokens": (_LENGTH, _INPUT),
    "features": (_INPUT,),
}
"""Shape of one input of the host that the check builds, by topology, without the batch axis."""


def check_blueprint(
    name: str, topology: Topology = "feature_map", width: int = 16, *, causal: bool = True
) -> None:
    """Raise BlueprintError if the blueprint ``name`` cannot be trained in a slot of ``width``.

    Every tensor of the seed and its gate must receive a gradient in the second backward pass. The check
    covers every blend operator, incubating and blended seeds, and five initialisations.

    Args:
        name: Name of the blueprint, which must be registered.
        topology: Kind of features at the slot: ``feature_map``, ``volume``, ``tokens`` or ``features``.
        width: Width of the slot: its number of channels or features.
        causal: For tokens, also require that the output of a token does not depend on later tokens.

    Raises:
        UnknownNameError: No blueprint of this name is registered for the topology.
        BlueprintError: A tensor of the seed receives no gradient, or a token depends on later tokens.

    Example:
        >>> check_blueprint("conv_light", width=32)
    """
    index = blueprint_named(name, topology).index
    styles = [
        style for style, operator in enumerate(STYLE_OPERATORS) if style == STYLE_OPERATORS.index(operator)
    ]
    for style, rng_seed, stage in product(styles, RNG_SEEDS, (Stage.TRAINING, Stage.BLENDING)):
        with TorchStream(rng_seed):
            model, x, y = _planted(index, topology, width, style, rng_seed)
            dead = dead_at_the_second_backward(model, x, y, stage)
            if dead:
                raise BlueprintError(
                    f"blueprint '{name}' is not alive at width {width} ({BLEND_IDS[style]}, {stage.name}):"
                    f" the second backward gives no gradient worth the name to {', '.join(dead)}. Make it an"
                    " esper.kasmina.Mirrored, and leave out what a later layer takes away again"
                )
            if topology == "tokens" and causal and sees_later_tokens(model.eval(), x):
                raise BlueprintError(
                    f"blueprint '{name}' lets a token see later ones. Mask them, or call check_blueprint"
                    " with causal=False if its hosts see all tokens anyway"
                )


def tensor_norms(slot: SeedSlot) -> dict[str, float]:
    """Return the norm of every parameter tensor of seed and gate, by parameter name."""
    return {name: weight.norm().item() for name, weight in _weights(slot)}


def dead_tensors(slot: SeedSlot, norms: Mapping[str, float]) -> list[str]:
    """Return the names of the parameter tensors of seed and gate whose gradient is missing or negligible.

    Argument ``norms`` has the norm of every parameter tensor, as ``tensor_norms`` returns it.
    """
    relative, absolute = LEAST_GRADIENT
    return [
        name
        for name, weight in _weights(slot)
        if weight.grad is None or not weight.grad.norm().item() >= relative * norms[name] + absolute
    ]


def _weights(slot: SeedSlot) -> Iterator[tuple[str, nn.Parameter]]:
    return slot.held.named_parameters()


def dead_at_the_second_backward(model: MorphogeneticModel, x: Tensor, y: Tensor, stage: Stage) -> list[str]:
    """Train the seed in the first slot for one step; return the names of its parameter tensors that receive
    no gradient in the next backward pass.
    """
    model.table.stage[0, 0], model.table.alpha[0, 0] = stage, 0.5
    model.sync()
    slot, groups = model.slot(0), model.groups
    assert groups is not None
    _backward(model, x, y, stage)
    for parameter in model.host_parameters():
        parameter.grad = None
    groups.optimisers[0].step()
    _backward(model, x, y, stage)
    return dead_tensors(slot, tensor_norms(slot))


def _backward(model: MorphogeneticModel, x: Tensor, y: Tensor, stage: Stage) -> None:
    model.drop_gradients()
    value = _loss(model(x), y)
    if stage is Stage.TRAINING:
        value = shadow_loss(model, 0, x, y, _loss)
    value.backward()


@torch.no_grad()
def sees_later_tokens(network: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Return whether the output of ``network`` for a token changes with a later token of ``x [batch, tokens,
    …]``."""
    outputs = network(x)
    others = x.roll(1, dims=0)
    for seen in range(1, x.shape[1]):
        changed = network(torch.cat([x[:, :seen], others[:, seen:]], dim=1))
        if not torch.equal(outputs[:, :seen], changed[:, :seen]):
            return True
    return False


class _Probe(Host):
    """Host of one layer, one slot and a classifier."""

    def __init__(self, topology: Topology, width: int) -> None:
        super().__init__()
        self.topology = topology
        first: nn.Module
        if topology == "feature_map":
            self.feature_shapes = ((width, _LENGTH, _LENGTH),)
            first = nn.Conv2d(_INPUT, width, 3, padding=1)
            last = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, _CLASSES))
        elif topology == "volume":
            self.feature_shapes = ((width, _LENGTH, _LENGTH, _LENGTH),)
            first = nn.Conv3d(_INPUT, width, 3, padding=1)
            last = nn.Sequential(nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(width, _CLASSES))
        else:
            self.feature_shapes = ((_LENGTH, width) if topology == "tokens" else (width,),)
            first, last = nn.Linear(_INPUT, width), nn.Sequential(nn.Linear(width, _CLASSES))
        self.segments = nn.ModuleList([first, last])


def _planted(
    blueprint: int, topology: Topology, width: int, style: int, rng_seed: int
) -> tuple[MorphogeneticModel, Tensor, Tensor]:
    """Return a host with a new seed in its slot, inputs, and targets."""
    model = MorphogeneticModel(_Probe(topology, width), streams=slot_streams(rng_seed))
    model.bind_optimiser(torch.optim.SGD(model.host.parameters(), lr=0.1, momentum=0.9))
    model.germinate(0, blueprint, style)
    x = torch.randn(_BATCH, *_SHAPES[topology])
    return model, x, torch.randint(_CLASSES, (_BATCH, _LENGTH) if topology == "tokens" else (_BATCH,))


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())
