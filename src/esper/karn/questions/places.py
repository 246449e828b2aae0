"""Places on a run's axis: epochs of an episode or iterations of a training; long runs join neighbours."""

from __future__ import annotations

import math
from typing import Final, Literal, NamedTuple

from esper.karn.questions.episodes import THIS_EPISODE, EpisodeKey, is_training
from esper.karn.run import Run

AxisName = Literal["epoch", "iteration"]
MOST_POINTS: Final = 200
"""Points of one line; of longer runs, neighbours are taken together."""


class Place(NamedTuple):
    """One epoch or iteration, or several that were taken together."""

    first: int
    last: int

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}–{self.last}"


class Axis(NamedTuple):
    """What a question about a run, or about one of its episodes, is asked over."""

    name: AxisName
    end: int
    """The planned number of iterations or epochs."""
    condition: str
    """SQL: which rows of tables about episodes belong to it."""
    parameters: list[int]

    @property
    def bin_size(self) -> int:
        """How many neighbours are taken together so that a line has few enough points."""
        return max(math.ceil(self.end / MOST_POINTS), 1)

    def place(self, epoch: str = "epoch") -> str:
        """SQL: the place of a row of an episode."""
        return "iteration" if self.name == "iteration" else epoch

    def group(self, place: str) -> str:
        """SQL: what is equal for places that are taken together."""
        return f"(({place}) - 1) // {self.bin_size}"


def axis_of(run: Run, episode: EpisodeKey | None) -> Axis:
    """Iterations of a whole training; epochs of one episode, or of all episodes of any other run."""
    if episode is not None:
        return Axis("epoch", run.row.horizon, THIS_EPISODE, [*episode])
    if is_training(run):
        return Axis("iteration", run.row.iterations or 0, "true", [])
    return Axis("epoch", run.row.horizon, "true", [])
