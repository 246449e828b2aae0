"""The numbers that govern a slot's episode, chosen once per run."""

from dataclasses import dataclass
from typing import Final, Literal

from esper.leyline.errors import UnknownNameError
from esper.leyline.factored_actions import (
    BLEND_IDS,
    CANONICAL_ACTION,
    HEAD_NAMES,
    OP_NAMES,
    AlphaCurve,
    AlphaSpeed,
    AlphaTarget,
    IntArray,
    Tempo,
)
from esper.leyline.slot_config import SlotConfig

IncubationMode = Literal["shadow", "straight_through"]
_NAMED_CHOICES: Final = (Tempo, AlphaTarget, AlphaSpeed, AlphaCurve)


@dataclass(frozen=True, slots=True)
class LifecycleRules:
    """Gates, delays and limits of the lifecycle; ages and delays are in host epochs."""

    min_training_epochs: int = 10
    """Length of the incubation; 0 sends a seed straight into BLENDING."""
    enters_at_once: bool = False
    """A seed's first ramp has no length, and the tempo head nothing to choose."""
    min_prune_age: int = 5
    embargo_epochs: int = 5
    max_seeds: int = 0
    """Live and fossilized seeds at one time; 0 means no limit."""
    auto_forward: bool = True
    """Stage moves happen by themselves when a stage is over; otherwise they are ADVANCE's job."""
    strict_fossilize: bool = False
    """G5 asks for a lower confidence bound, not only for a measurement."""
    min_contribution: float = 0.0
    """Points that the lower bound must reach under ``strict_fossilize``."""
    incubation: IncubationMode = "shadow"
    blueprints: tuple[str, ...] = ()
    """What a controller may choose from, by name; all there are unless named."""
    fossil_watch_epochs: int = 50
    """A fossil older than this counts as host: it is no longer switched off to be measured."""


@dataclass(frozen=True, slots=True)
class ActionSpace:
    """What a controller may choose from: slots, lifecycle rules, blueprints of this host."""

    slot_config: SlotConfig
    rules: LifecycleRules
    blueprints: tuple[int, ...]
    """Selectable blueprint indices, ascending."""
    blueprint_names: tuple[str, ...]
    """Name of every blueprint index on this kind of host, also of those that are not selectable."""
    unfit: frozenset[tuple[int, int]] = frozenset()
    """(slot, blueprint) where the width of the slot rules a selectable blueprint out."""

    def action(self, op: str, **choices: str) -> IntArray:
        """One decision ``[1, 8]`` in words: ``space.action("germinate", slot="layer2", blueprint="norm")``.

        Heads by their names; what is not named stays at its default.
        """
        action = CANONICAL_ACTION.copy()
        for name, choice in {"op": op.upper(), **choices}.items():
            if name not in HEAD_NAMES:
                raise UnknownNameError("part of a decision", name, HEAD_NAMES)
            head = HEAD_NAMES.index(name)
            names = self.choice_names[head]
            allowed = [names[index] for index in self.blueprints] if name == "blueprint" else names
            if choice not in allowed:
                raise UnknownNameError(name, choice, allowed)
            action[head] = names.index(choice)
        return action[None]

    @property
    def choice_names(self) -> tuple[tuple[str, ...], ...]:
        """Per head, in the order of ``HEAD_NAMES``, the names of its choices in index order."""
        return (
            OP_NAMES,
            self.slot_config.slot_ids,
            self.blueprint_names,
            BLEND_IDS,
            *(tuple(choice.name.lower() for choice in kind) for kind in _NAMED_CHOICES),
        )
