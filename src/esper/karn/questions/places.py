"""Places on a run's axis: epochs of a life or rounds of a training, neighbours together in long runs."""

from __future__ import annotations

import math
from typing import Final, Literal, NamedTuple

from esper.karn.questions.lives import ROUND, LifeKey, is_training
from esper.karn.run import Run

AxisName = Literal["epoch", "round"]
MOST_POINTS: Final = 200
"""Points of one line; of longer runs, neighbours are taken together."""


class Place(NamedTuple):
    """One epoch or round, or several that were taken together."""

    first: int
    last: int

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}–{self.last}"


class Axis(NamedTuple):
    """What a question about a run, or about one of its lives, is asked over."""

    name: AxisName
    end: int
    """The planned number of rounds or epochs."""
    condition: str
    """SQL: which rows of tables about lives belong to it."""
    parameters: list[int]

    @property
    def bin_size(self) -> int:
        """How many neighbours are taken together so that a line has few enough points."""
        return max(math.ceil(self.end / MOST_POINTS), 1)

    def place(self, epoch: str = "epoch") -> str:
        """SQL: the place of a row of a life."""
        return ROUND if self.name == "round" else epoch

    def group(self, place: str) -> str:
        """SQL: what is equal for places that are taken together."""
        return f"(({place}) - 1) // {self.bin_size}"


def axis_of(run: Run, life: LifeKey | None) -> Axis:
    """Rounds of a whole training; epochs of one life, or of all lives of any other run."""
    if life is not None:
        return Axis("epoch", run.row.horizon, "env = ? AND episode = ?", [*life])
    if is_training(run):
        return Axis("round", run.row.rounds or 0, "true", [])
    return Axis("epoch", run.row.horizon, "true", [])
