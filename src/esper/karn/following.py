"""What a view knows of a run while it goes on: rows in, the state of a run or of a training out.

A run is followed episode by episode. The rows of a training arrive iteration by iteration, and its view shows one
episode of the last iteration: the best one, or that of a chosen environment. Every unknown is None.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

from esper.karn.episode_state import EpisodeState, SlotState
from esper.karn.episodes import HORIZON
from esper.karn.statistics import mean
from esper.leyline.events import AlertRow, EnvRow, EpisodeRow, Row, RunRow, UpdateRow

PACE_ITERATIONS: Final = 10
"""How many of the last iterations tell the pace of those to come."""


Quartiles = tuple[float | None, float | None]
"""The lower and the upper one; unknown for fewer than two values."""


@dataclass(frozen=True, slots=True)
class IterationState:
    """A finished iteration: the policy's row, and what the episodes came to that it was made from."""

    row: UpdateRow
    returns: Quartiles
    scores: Quartiles
    twin_score: float | None
    """Mean of the twins of the episodes that lasted, as the row's score is; unknown where none was lived."""
    refused_share: float | None
    """Decisions that did not come about."""

    @classmethod
    def of(cls, row: UpdateRow, episodes: Sequence[EpisodeRow]) -> Self:
        """The state of an iteration of which these episodes are finished."""
        decided = sum(sum(episode.op_counts) for episode in episodes)
        return cls(
            row,
            returns=quartiles(
                [episode.total_reward for episode in episodes if episode.total_reward is not None]
            ),
            scores=quartiles([episode.val_score for episode in episodes]),
            twin_score=mean(episode.twin_val_score for episode in episodes if episode.ended_by == HORIZON),
            refused_share=sum(episode.refused for episode in episodes) / decided if decided else None,
        )


def quartiles(values: Sequence[float]) -> Quartiles:
    """Of the episodes of an iteration."""
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
    """The run, its finished iterations if it is a training, its alerts, and the episode that is shown."""

    env: int | None = None
    """The environment to follow; None: the first of a run, the best of a training's iteration."""
    run: RunRow | None = None
    episode: EpisodeState | None = None
    """The one that is shown."""
    episodes: list[EpisodeState] = field(default_factory=list)
    """All episodes of the last iteration of a training."""
    iterations: list[IterationState] = field(default_factory=list)
    alerts: dict[tuple[str, str], AlertState] = field(default_factory=dict)
    """By rule and scope, the last one raised at the end."""
    now: float = 0.0
    taken_at: float = 0.0
    """When the last row came that says how long something took, on the clock of ``now``."""
    _arriving: dict[tuple[int, int], EpisodeState] = field(default_factory=dict)
    """Episodes of the iteration that is being taken, by environment and episode."""

    @property
    def is_training(self) -> bool:
        return self.run is not None and self.run.iterations is not None

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
                self._end_iteration(row)
            case EnvRow():
                return self._take_episode_row(row)
            case _:
                return False
        return True

    def _begin(self, run: RunRow) -> None:
        self.run, self.episode = run, None
        self.taken_at = self.now

    def _take_alert(self, row: AlertRow) -> None:
        key = (row.rule, row.scope)
        if row.event == "raised":
            before = self.alerts.pop(key, None)
            self.alerts[key] = AlertState(row, times=1 if before is None else before.times + 1)
        elif key in self.alerts:
            self.alerts[key].cleared = row

    def is_open(self, alert: AlertState) -> bool:
        """Not cleared; an alert about an episode of a training ends with the episode's iteration."""
        row = alert.raised
        if alert.cleared is not None or not self.is_training or row.episode is None or not self.iterations:
            return alert.cleared is None
        return (row.iteration or 0) >= self.iterations[-1].row.iteration

    def _take_episode_row(self, row: EnvRow) -> bool:
        if self.is_training:
            key = (row.env, row.episode)
            if key not in self._arriving:
                self._arriving[key] = self._new_episode(row)
            self._arriving[key].take(row)
            return False
        if row.env != (self.env or 0):
            return False
        if self.episode is None or self.episode.episode != row.episode:
            self.episode = self._new_episode(row)
        self.episode.take(row)
        self.taken_at = self.now
        return True

    def _new_episode(self, row: EnvRow) -> EpisodeState:
        slots = [] if self.run is None else self.run.slots
        return EpisodeState(row.env, row.episode, [SlotState() for _ in slots])

    def _end_iteration(self, row: UpdateRow) -> None:
        """Close the iteration; a run that was resumed repeats the iterations after its checkpoint."""
        arrived = [episode for episode in self._arriving.values() if episode.episode + 1 == row.iteration]
        episodes = [episode.result for episode in arrived if episode.result is not None]
        self.iterations = [kept for kept in self.iterations if kept.row.iteration < row.iteration]
        self.iterations.append(IterationState.of(row, episodes))
        self.episodes = sorted(arrived, key=lambda episode: (episode.env, episode.episode))
        self.episode = self._chosen_episode()
        self._arriving = {}
        self.taken_at = self.now

    def _chosen_episode(self) -> EpisodeState | None:
        if self.env is None:
            return best_episode(self.episodes)
        return next((episode for episode in reversed(self.episodes) if episode.env == self.env), None)

    @property
    def seconds(self) -> float | None:
        """Time of what is finished: all iterations, or the epochs of the present episode."""
        if self.is_training:
            return sum(past.row.seconds for past in self.iterations)
        return None if self.episode is None else self.episode.seconds

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
            recent = [past.row.seconds for past in self.iterations[-PACE_ITERATIONS:]]
            done, total = (
                self.iterations[-1].row.iteration if self.iterations else 0,
                self.run.iterations or 0,
            )
            pace = sum(recent) / len(recent) if recent else None
        else:
            done, total = self.episode.epoch if self.episode else 0, self.run.horizon
            pace = self.episode.seconds / done if self.episode and done else None
        if pace is None:
            return None
        remaining = max(total - done, 0)
        return max(pace * remaining - self._waited, 0.0)

    @property
    def steps_per_second(self) -> float | None:
        """Epochs of a host, all environments together, per second of wall-clock time."""
        if self.run is not None and self.iterations:
            seconds = self.iterations[-1].row.seconds
            return self.run.envs * self.run.horizon / seconds if seconds > 0 else None
        if self.episode is None or self.episode.seconds <= 0:
            return None
        return len(self.episode.scores) / self.episode.seconds

    @property
    def _waited(self) -> float:
        return self.now - self.taken_at


def best_episode(episodes: Iterable[EpisodeState]) -> EpisodeState | None:
    """The finished episode with the highest score."""
    finished = [(episode.result.val_score, episode) for episode in episodes if episode.result is not None]
    return max(finished, key=lambda pair: pair[0])[1] if finished else None
