"""What happened in a user's network, each as one plain sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from esper.growth.body import GrowingBody
from esper.leyline.errors import GrowthWarning
from esper.leyline.rows import StageMove
from esper.leyline.stages import Stage

EventKind = Literal["measured", "raced", "germinated", "alpha", "fossilized", "pruned", "refused", "warning"]
_TOLD: Final[Mapping[Stage, tuple[EventKind, str]]] = {
    Stage.GERMINATED: ("germinated", "was planted"),
    Stage.FOSSILIZED: ("fossilized", "became permanent"),
    Stage.PRUNED: ("pruned", "was removed"),
}
"""Moves that are worth a sentence."""


@dataclass(frozen=True, slots=True)
class GrowthEvent:
    """One thing that happened at the end of an epoch, or by hand after it; prints as its sentence."""

    epoch: int
    """Epochs that were trained."""
    kind: EventKind
    sentence: str
    slot: str | None = None
    blueprint: str | None = None
    contribution: float | None = None
    """In units of the user's metric, positive where the seed helps."""
    error: float | None = None
    """Standard error of the contribution, where the metric came batch by batch."""

    def __str__(self) -> str:
        return f"epoch {self.epoch}: {self.sentence}"


class Narrator:
    """Makes events of what happens to one body."""

    def __init__(self, body: GrowingBody) -> None:
        self._body = body
        self.epoch = 0

    def seed(self, slot: int, blueprint: int | None = None) -> str:
        """``conv_light in layer2``: the seed of a slot, or of a blueprint that was there."""
        return f"{self._name(slot, blueprint)} in {self._body.sites[slot].name}"

    def _name(self, slot: int, blueprint: int | None = None) -> str | None:
        number = int(self._body.table.blueprint[0, slot]) if blueprint is None else blueprint
        return None if number < 0 else self._body.action_space.blueprint_names[number]

    def about(
        self,
        kind: EventKind,
        slot: int,
        says: str,
        *,
        contribution: float | None = None,
        error: float | None = None,
        blueprint: int | None = None,
    ) -> GrowthEvent:
        """An event of one seed: ``says`` follows its name."""
        place, name = self._body.sites[slot].name, self._name(slot, blueprint)
        sentence = f"{self.seed(slot, blueprint)} {says}"
        return GrowthEvent(self.epoch, kind, sentence, place, name, contribution, error)

    def worth(self, slot: int, value: float, error: float, *, calibrated: bool) -> GrowthEvent:
        """A contribution and its standard error, NaN where there is none."""
        bar = "" if math.isnan(error) else f" ± {error:.2g}"
        note = "" if calibrated else " (uncalibrated: BatchNorm statistics are those with it on)"
        known = None if math.isnan(error) else error
        says = f"is worth {value:+.3g}{bar}{note}"
        return self.about("measured", slot, says, contribution=value, error=known)

    def moves(self, moves: Iterable[StageMove]) -> list[GrowthEvent]:
        """The moves that are worth a sentence."""
        events = []
        for move in moves:
            if move.target in _TOLD:
                kind, says = _TOLD[move.target]
                if kind == "germinated":
                    says += f" ({int(self._body.table.seed_params[0, move.slot]):,} parameters)"
                events.append(self.about(kind, move.slot, says, blueprint=move.blueprint))
        return events

    def refused(self, slot: int, sentence: str) -> GrowthEvent:
        """A controller's wish that came to nothing."""
        return GrowthEvent(self.epoch, "refused", sentence, self._body.sites[slot].name)

    def warning(self, sentence: str, slot: int | None = None) -> GrowthEvent:
        """A warning, raised as one too."""
        GrowthWarning.issue(f"epoch {self.epoch}: {sentence}")
        if slot is None:
            return GrowthEvent(self.epoch, "warning", sentence)
        return GrowthEvent(self.epoch, "warning", sentence, self._body.sites[slot].name, self._name(slot))
