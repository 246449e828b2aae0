"""Slots of a host, lifecycle rules of a run, and the action space: the choices that rules, slots and
blueprints allow."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from esper.leyline.errors import SlotError, UnknownNameError
from esper.leyline.factored_actions import CANONICAL_ACTION, CHOICES, HEAD_NAMES, OP_NAMES, IntArray

_SLOT_ID = re.compile(r"[^\s@:,]+")


@dataclass(frozen=True, slots=True)
class SlotConfig:
    """Slot ids of a host in the order of the forward pass.

    Slot ids are ``r{row}c{column}`` in built-in hosts and names of submodules in a user's network. The
    position of a slot id in ``slot_ids`` is the slot index in every array.
    """

    slot_ids: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.slot_ids:
            raise SlotError("a model needs at least one slot; none was named")
        malformed = [s for s in self.slot_ids if not _SLOT_ID.fullmatch(s)]
        if malformed:
            raise SlotError(
                f"slot ids are names such as r0c2 or layer2.0, without blanks and @:,; found {malformed}"
            )
        if len(set(self.slot_ids)) != len(self.slot_ids):
            raise SlotError(f"slot ids must be distinct; found {', '.join(self.slot_ids)}")

    @classmethod
    def default(cls) -> SlotConfig:
        """Return the ids of three slots in one row: r0c0, r0c1, r0c2."""
        return cls.of_count(3)

    @classmethod
    def of_count(cls, count: int) -> SlotConfig:
        """Return the ids of ``count`` slots in one row: r0c0, r0c1 and so on."""
        return cls(tuple(f"r0c{column}" for column in range(count)))

    @property
    def num_slots(self) -> int:
        return len(self.slot_ids)

    def index_of(self, slot_id: str) -> int:
        try:
            return self.slot_ids.index(slot_id)
        except ValueError:
            raise SlotError(
                f"slot '{slot_id}' is not in this model; its slots are {', '.join(self.slot_ids)}"
            ) from None

    def select(self, wanted: Iterable[str]) -> tuple[bool, ...]:
        """Return one flag per slot, true for the slots whose id is in ``wanted``.

        Raises:
            SlotError: A slot id is unknown, or ``wanted`` is empty.
        """
        chosen = {self.index_of(slot_id) for slot_id in wanted}
        if not chosen:
            raise SlotError(f"no slot was enabled; this model's slots are {', '.join(self.slot_ids)}")
        return tuple(index in chosen for index in range(self.num_slots))


@dataclass(frozen=True, slots=True)
class LifecycleRules:
    """Delays and limits of the seed lifecycle; ages and delays are in epochs of the host."""

    min_training_epochs: int = 10
    """Length of stage TRAINING in epochs; if 0, a new seed enters BLENDING directly."""
    enters_at_once: bool = False
    """Whether the first alpha ramp of a seed has length 0; the tempo head then has no effect."""
    min_prune_age: int = 5
    embargo_epochs: int = 5
    max_seeds: int = 0
    """Largest number of seeds, live and fossilized together, that a host may have at one time; 0 means no
    limit."""
    auto_forward: bool = True
    """Whether seeds move to the next stage automatically; otherwise only by the op ADVANCE."""
    strict_fossilize: bool = False
    """Whether gate G5 requires a lower confidence bound of a seed's contribution, not only a measurement."""
    min_contribution: float = 0.0
    """Smallest lower confidence bound of a contribution, in points, that passes gate G5 if
    ``strict_fossilize`` is set."""
    blueprints: tuple[str, ...] = ()
    """Names of the blueprints that a controller may choose; empty for all blueprints of the host."""
    fossil_watch_epochs: int = 50
    """Age in epochs from which the contribution of a fossilized seed is no longer measured."""


@dataclass(frozen=True, slots=True)
class ActionSpace:
    """Action space of one host: its slots, its lifecycle rules, and the blueprints that a controller may
    choose.
    """

    slot_config: SlotConfig
    rules: LifecycleRules
    blueprints: tuple[int, ...]
    """Blueprint indices that a controller may choose, ascending."""
    blueprint_names: tuple[str, ...]
    """Name of every blueprint index of the host, including those that a controller may not choose."""
    unfit: frozenset[tuple[int, int]] = frozenset()
    """Pairs (slot, blueprint) in which the blueprint may be chosen but does not fit the width of the slot."""

    def action(self, op: str, **choices: str) -> IntArray:
        """Return one action as an array ``[1, head]``, from the names of op, slot and other choices.

        Args:
            op: Name of the op in upper or lower case, such as ``"germinate"``.
            choices: Name of the chosen value for each head, such as ``slot="layer2"``; other heads get their
                canonical value.

        Raises:
            UnknownNameError: A head or value does not exist, or the blueprint may not be chosen.

        Example:
            ``space.action("germinate", slot="layer2", blueprint="norm")``
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
        """Names of the values of each head, by index; heads are in the order of ``HEAD_NAMES``."""
        others = (tuple(choice.name.lower() for choice in kind) for kind in CHOICES[1:])
        return (OP_NAMES, self.slot_config.slot_ids, self.blueprint_names, *others)
