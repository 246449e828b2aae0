"""Ids and order of a model's slots, upstream first."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from esper.leyline.errors import SlotError

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
