"""What a view knows of a run while it goes on: rows in, the state of a run or of a training out.

A run is followed life by life. The rows of a training arrive round by round, and its view shows one
life of the last round: the best one, or that of a chosen environment. Every unknown is None.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

from esper.karn.life_state import LifeState, SlotState
from esper.karn.lives import HORIZON
from esper.karn.statistics import mean
from esper.leyline.events import AlertRow, EpisodeRow, LifeRow, Row, RunRow, UpdateRow, round_of

PACE_ROUNDS: Final = 10
"""How many of the last rounds tell the pace of those to come."""


Quartiles = tuple[float | None, float | None]
"""The lower and the upper one; unknown for fewer than two values."""


@dataclass(frozen=True, slots=True)
class RoundState:
    """A finished round: the policy's row, and what the lives came to that it was made from."""

    row: UpdateRow
    returns: Quartiles
    scores: Quartiles
    twin_score: float | None
    """Mean of the twins of the lives that lasted, as the row's score is; unknown where none was lived."""
    refused_share: float | None
    """Decisions that did not come about."""

    @classmethod
    def of(cls, row: UpdateRow, lives: Sequence[EpisodeRow]) -> Self:
        """The state of a round of which these lives are finished."""
        decided = sum(sum(life.op_counts) for life in lives)
        return cls(
            row,
            returns=quartiles([life.total_reward for life in lives if life.total_reward is not None]),
            scores=quartiles([life.val_score for life in lives]),
            twin_score=mean(life.twin_val_score for life in lives if life.ended_by == HORIZON),
            refused_share=sum(life.refused for life in lives) / decided if decided else None,
        )


def quartiles(values: Sequence[float]) -> Quartiles:
    """Of the lives of a round."""
    if len(values) < 2:
        return None, None
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


@dataclass(slots=True)
class AlertState:
    """One rule about one thing: how often it was raised, last by which row, and what cleared it if it is."""

    raised: AlertRow
    times: int
    cleared: AlertRow | None = None


@dataclass(slots=True)
class Following:
    """The run, its finished rounds if it is a training, its alerts, and the life that is shown."""

    env: int | None = None
    """The environment to follow; None: the first of a run, the best of a training's round."""
    run: RunRow | None = None
    life: LifeState | None = None
    """The one that is shown."""
    lives: list[LifeState] = field(default_factory=list)
    """All lives of the last round of a training."""
    rounds: list[RoundState] = field(default_factory=list)
    alerts: dict[tuple[str, str], AlertState] = field(default_factory=dict)
    """By rule and scope, the last one raised at the end."""
    now: float = 0.0
    taken_at: float = 0.0
    """When the last row came that says how long something took, on the clock of ``now``."""
    _arriving: dict[tuple[int, int], LifeState] = field(default_factory=dict)
    """Lives of the round that is being taken, by environment and episode."""

    @property
    def is_training(self) -> bool:
        return self.run is not None and self.run.rounds is not None

    def take(self, row: Row, now: float) -> bool:
        """Take one row at time ``now`` (seconds of any clock); False if it is not followed."""
        self.now = now
        if self.run is None and not isinstance(row, RunRow):
            return False
        match row:
            case RunRow():
                self._begin(row)
            case AlertRow():
                self._take_alert(row)
            case UpdateRow():
                self._end_round(row)
            case LifeRow():
                return self._take_life_row(row)
            case _:
                return False
        return True

    def _begin(self, run: RunRow) -> None:
        self.run, self.life = run, None
        self.taken_at = self.now

    def _take_alert(self, row: AlertRow) -> None:
        key = (row.rule, row.scope)
        if row.event == "raised":
            before = self.alerts.pop(key, None)
            self.alerts[key] = AlertState(row, times=1 if before is None else before.times + 1)
        elif key in self.alerts:
            self.alerts[key].cleared = row

    def is_open(self, alert: AlertState) -> bool:
        """Not cleared; an alert about a life of a training ends with the life's round."""
        row = alert.raised
        if alert.cleared is not None or not self.is_training or row.episode is None or not self.rounds:
            return alert.cleared is None
        return round_of(row.episode) >= self.rounds[-1].row.round

    def _take_life_row(self, row: LifeRow) -> bool:
        if self.is_training:
            key = (row.env, row.episode)
            if key not in self._arriving:
                self._arriving[key] = self._new_life(row)
            self._arriving[key].take(row)
            return False
        if row.env != (self.env or 0):
            return False
        if self.life is None or self.life.episode != row.episode:
            self.life = self._new_life(row)
        self.life.take(row)
        self.taken_at = self.now
        return True

    def _new_life(self, row: LifeRow) -> LifeState:
        slots = [] if self.run is None else self.run.slots
        return LifeState(row.env, row.episode, [SlotState() for _ in slots])

    def _end_round(self, row: UpdateRow) -> None:
        """Close the round; a run that was resumed repeats the rounds after its checkpoint."""
        arrived = [life for life in self._arriving.values() if round_of(life.episode) == row.round]
        episodes = [life.result for life in arrived if life.result is not None]
        self.rounds = [kept for kept in self.rounds if kept.row.round < row.round]
        self.rounds.append(RoundState.of(row, episodes))
        self.lives = sorted(arrived, key=lambda life: (life.env, life.episode))
        self.life = self._chosen_life()
        self._arriving = {}
        self.taken_at = self.now

    def _chosen_life(self) -> LifeState | None:
        if self.env is None:
            return best_life(self.lives)
        return next((life for life in reversed(self.lives) if life.env == self.env), None)

    @property
    def seconds(self) -> float | None:
        """Time of what is finished: all rounds, or the epochs of the present life."""
        if self.is_training:
            return sum(past.row.seconds for past in self.rounds)
        return None if self.life is None else self.life.seconds

    @property
    def elapsed(self) -> float | None:
        """The same with what is under way."""
        return None if self.seconds is None else self.seconds + self._waited

    @property
    def left(self) -> float | None:
        """Time to the end at the pace so far; unknown before anything is finished."""
        if self.run is None:
            return None
        if self.is_training:
            recent = [past.row.seconds for past in self.rounds[-PACE_ROUNDS:]]
            done, total = self.rounds[-1].row.round if self.rounds else 0, self.run.rounds or 0
            pace = sum(recent) / len(recent) if recent else None
        else:
            done, total = self.life.epoch if self.life else 0, self.run.horizon
            pace = self.life.seconds / done if self.life and done else None
        if pace is None:
            return None
        remaining = max(total - done, 0)
        return max(pace * remaining - self._waited, 0.0)

    @property
    def steps_per_second(self) -> float | None:
        """Epochs of a host, all environments together, per second of wall-clock time."""
        if self.run is not None and self.rounds:
            seconds = self.rounds[-1].row.seconds
            return self.run.envs * self.run.horizon / seconds if seconds > 0 else None
        if self.life is None or self.life.seconds <= 0:
            return None
        return len(self.life.scores) / self.life.seconds

    @property
    def _waited(self) -> float:
        return self.now - self.taken_at


def best_life(lives: Iterable[LifeState]) -> LifeState | None:
    """The finished life with the highest score."""
    finished = [(life.result.val_score, life) for life in lives if life.result is not None]
    return max(finished, key=lambda pair: pair[0])[1] if finished else None
