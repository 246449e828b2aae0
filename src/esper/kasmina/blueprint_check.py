"""What a blueprint owes its host, checked in one call.

Germination refuses a seed that does not keep the shape or does not begin at zero. Whether all of it
comes alive, and whether a token stays blind to later ones, shows only once it learns:
``check_blueprint`` lets it, in a slot between two small layers.
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
from esper.leyline.errors import BlueprintError
from esper.leyline.factored_actions import BLEND_IDS, STYLE_OPERATORS
from esper.leyline.slot_config import SlotConfig
from esper.leyline.stages import Stage

RNG_SEEDS: Final = range(5)
"""Initialisations that a blueprint must be alive under."""
LEAST_GRADIENT: Final = (1e-6, 1e-8)
"""The norm of a tensor's gradient must reach the first times the tensor's own norm, plus the second."""

_CLASSES, _BATCH, _LENGTH, _INPUT = 4, 16, 6, 2
_SHAPES: Final[Mapping[Topology, tuple[int, ...]]] = {
    "feature_map": (_INPUT, _LENGTH, _LENGTH),
    "tokens": (_LENGTH, _INPUT),
    "features": (_INPUT,),
}
"""Of one input of the probe."""


def check_blueprint(
    name: str, topology: Topology = "feature_map", width: int = 16, *, causal: bool = True
) -> None:
    """Raise a sentence about what blueprint ``name`` does wrong in a slot of ``width``; else return.

    It must germinate, and be alive at the second backward with every tensor of seed and gate: under
    every operator, incubating and blended, over five initialisations. On tokens no delta may depend
    on a later token, unless the hosts that it is meant for see all of them (``causal=False``).
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
    """Return the norm of every tensor of seed and gate, by its name in the graft."""
    return {name: weight.norm().item() for name, weight in _weights(slot)}


def dead_tensors(slot: SeedSlot, norms: Mapping[str, float]) -> list[str]:
    """Tensors of seed and gate whose gradient is missing or next to nothing; ``norms`` are their own."""
    relative, absolute = LEAST_GRADIENT
    return [
        name
        for name, weight in _weights(slot)
        if weight.grad is None or not weight.grad.norm().item() >= relative * norms[name] + absolute
    ]


def _weights(slot: SeedSlot) -> Iterator[tuple[str, nn.Parameter]]:
    assert slot.graft is not None
    return slot.graft.named_parameters()


def dead_at_the_second_backward(model: MorphogeneticModel, x: Tensor, y: Tensor, stage: Stage) -> list[str]:
    """Tensors of the new seed in the first slot that are still dead once it has learned one step."""
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
    """Whether a token's output changes, be it by a bit, with a later token of ``x [batch, tokens, …]``."""
    outputs = network(x)
    others = x.roll(1, dims=0)
    for seen in range(1, x.shape[1]):
        changed = network(torch.cat([x[:, :seen], others[:, seen:]], dim=1))
        if not torch.equal(outputs[:, :seen], changed[:, :seen]):
            return True
    return False


class _Probe(Host):
    """A layer, the slot, a classifier."""

    def __init__(self, topology: Topology, width: int) -> None:
        super().__init__()
        self.topology = topology
        self.slot_config = SlotConfig.of_count(1)
        first: nn.Module
        if topology == "feature_map":
            self.feature_shapes = ((width, _LENGTH, _LENGTH),)
            first = nn.Conv2d(_INPUT, width, 3, padding=1)
            last = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, _CLASSES))
        else:
            self.feature_shapes = ((_LENGTH, width) if topology == "tokens" else (width,),)
            first, last = nn.Linear(_INPUT, width), nn.Sequential(nn.Linear(width, _CLASSES))
        self.segments = nn.ModuleList([first, last])


def _planted(
    blueprint: int, topology: Topology, width: int, style: int, rng_seed: int
) -> tuple[MorphogeneticModel, Tensor, Tensor]:
    """A host with a new seed, and inputs and targets to train it on."""
    model = MorphogeneticModel(_Probe(topology, width), streams=slot_streams(rng_seed))
    model.bind_optimiser(torch.optim.SGD(model.host.parameters(), lr=0.1, momentum=0.9))
    model.germinate(0, blueprint, style)
    x = torch.randn(_BATCH, *_SHAPES[topology])
    return model, x, torch.randint(_CLASSES, (_BATCH, _LENGTH) if topology == "tokens" else (_BATCH,))


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())
