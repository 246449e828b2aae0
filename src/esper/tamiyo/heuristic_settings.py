"""What can be tuned in the heuristic, and the order in which it prefers blueprints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from esper.leyline import ActionSpace, AlphaSpeed, Style, Tempo, UnknownNameError
from esper.leyline.limits import CONFIDENCE_Z

SlotOrder = Literal["upstream_first", "middle_first", "downstream_first"]

STRONGEST_FIRST: Final = (
    ["conv_heavy", "conv_light", "bottleneck", "depthwise", "norm", "conv_small", "attention"],
    ["mlp", "attention", "mlp_small", "lora_large", "flex_attention", "lora", "norm"],
)
"""Blueprints of images and of tokens."""


@dataclass(frozen=True, slots=True)
class HeuristicSettings:
    """What can be tuned; epochs are host epochs, contributions are points of score."""

    patience: int = 0
    """Plateau epochs before a germination; 0 means whenever a slot is free."""
    rotation: tuple[str, ...] = ()
    """Blueprints by name, the favourite first; empty means all of the host's, strongest first."""
    rotate: bool = False
    """Move on in the rotation after every germination, not only when a blueprint was pruned."""
    penalty_steps: int = 10
    """Steps for which a pruned blueprint stands behind the others; a second prune adds as many."""
    slot_order: SlotOrder = "middle_first"
    """Which free slot is planted first, among the enabled ones."""
    style: Style = Style.LINEAR_ADD
    tempo: Tempo = Tempo.FAST
    confidence_z: float = CONFIDENCE_Z
    """Standard errors by which a contribution must clear a threshold to count."""
    fossilize_above: float = 0.0
    """Contribution above which a held seed becomes permanent."""
    prune_below: float = 0.0
    """Contribution below which a seed is removed."""
    evaluation_epochs: int = 1
    """Epochs at a resting alpha before a seed may be removed for its contribution."""
    stuck_epochs: int = 5
    """Epochs beyond its stage's own length after which a seed counts as stuck.

    A held seed has no such length: after this many epochs its contribution decides without error bar.
    """
    prune_speed: AlphaSpeed = AlphaSpeed.INSTANT
    """How fast alpha falls before a seed is removed."""

    def __post_init__(self) -> None:
        if self.slot_order not in get_args(SlotOrder):
            raise UnknownNameError("slot order", self.slot_order, get_args(SlotOrder))


def default_rotation(space: ActionSpace) -> tuple[int, ...]:
    """The selectable blueprints, strongest first; those nobody has ranked follow in index order.

    Known by name: the index of a blueprint may be a user's own on the other kind of host.
    """
    index_of = {space.blueprint_names[index]: index for index in space.blueprints}
    order = max(STRONGEST_FIRST, key=lambda names: len(index_of.keys() & set(names)))
    ranked = [index_of[name] for name in order if name in index_of]
    return (*ranked, *(index for index in space.blueprints if index not in ranked))
