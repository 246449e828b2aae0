"""One episode as far as its rows were seen: slots with their lanes, scores, decisions, events.

Rows in, state out; every unknown is None. Rows of one epoch may come in any order.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from esper.leyline.events import DecisionRow, EnvRow, EpisodeRow, EpochRow, SeedRow, TransitionRow
from esper.leyline.factored_actions import Head
from esper.leyline.stages import OCCUPIED_STAGES, Stage


@dataclass(slots=True)
class SlotState:
    """One slot: what it holds, and the stage it had after each epoch."""

    stage: Stage = Stage.DORMANT
    blueprint: int | None = None
    last_blueprint: int | None = None
    """Of the seed that is there, or was there last."""
    alpha: float | None = None
    contribution: float | None = None
    contribution_error: float | None = None
    shapley: float | None = None
    gradient_health: float | None = None
    params: int | None = None
    lane: dict[int, Stage] = field(default_factory=dict)
    was_pruned: bool = False
    """Since the last epoch ended; PRUNED lasts no epoch, so the lane would not show it."""

    def empty(self) -> None:
        """Forget the seed; the lane stays, and the name of what was there."""
        self.blueprint = self.alpha = self.params = self.gradient_health = None
        self.contribution = self.contribution_error = self.shapley = None

    def take_transition(self, row: TransitionRow) -> None:
        self.stage = Stage(row.to_stage)
        if self.stage is Stage.GERMINATED:
            self.empty()
            self.blueprint = self.last_blueprint = row.blueprint
        elif self.stage is Stage.PRUNED:
            self.was_pruned = True
        if self.stage not in OCCUPIED_STAGES:
            self.empty()
        elif row.contribution is not None and row.contribution != self.contribution:
            # The one source where no seed rows are written; these would know the error too.
            self.contribution, self.contribution_error = row.contribution, None

    def take_seed(self, row: SeedRow) -> None:
        self.stage = Stage(row.stage)
        self.blueprint = self.last_blueprint = row.blueprint
        self.alpha, self.params = row.alpha, row.params
        self.contribution, self.contribution_error = row.contribution, row.contribution_error
        self.shapley, self.gradient_health = row.shapley, row.gradient_health
        if self.lane.get(row.epoch, Stage.PRUNED) is not Stage.PRUNED:
            self.lane[row.epoch] = self.stage

    def end_epoch(self, epoch: int) -> None:
        self.lane[epoch] = Stage.PRUNED if self.was_pruned else self.stage
        self.was_pruned = False


@dataclass(slots=True)
class EpisodeState:
    """One episode of one environment."""

    env: int
    episode: int
    slots: list[SlotState]
    epoch: int = 0
    latest: EpochRow | None = None
    scores: dict[int, float] = field(default_factory=dict)
    """By epoch; ``twin_scores`` and ``losses`` likewise."""
    twin_scores: dict[int, float] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    seconds: float = 0.0
    """Time of the epochs so far."""
    decisions: dict[int, DecisionRow] = field(default_factory=dict)
    """By the epoch that they were made for."""
    transitions: list[TransitionRow] = field(default_factory=list)
    result: EpisodeRow | None = None

    @property
    def best_score(self) -> float | None:
        return max(self.scores.values(), default=None)

    @property
    def ops(self) -> Counter[int]:
        """How often each op was chosen."""
        return Counter(row.action[Head.OP] for row in self.decisions.values())

    @property
    def refused(self) -> int:
        return sum(not row.succeeded for row in self.decisions.values())

    def take(self, row: EnvRow) -> None:
        match row:
            case EpochRow():
                self._take_epoch(row)
            case SeedRow():
                self.slots[row.slot].take_seed(row)
            case TransitionRow():
                self.slots[row.slot].take_transition(row)
                self.transitions.append(row)
            case DecisionRow():
                self.decisions[row.epoch + 1] = row
            case EpisodeRow():
                self._take_result(row)

    def _take_epoch(self, row: EpochRow) -> None:
        self.epoch, self.latest = row.epoch, row
        self.seconds += row.ms / 1000
        self.scores[row.epoch] = row.val_score
        self.losses[row.epoch] = row.val_loss
        if row.twin_score is not None:
            self.twin_scores[row.epoch] = row.twin_score
        for slot in self.slots:
            slot.end_epoch(row.epoch)

    def _take_result(self, row: EpisodeRow) -> None:
        self.result, self.epoch = row, row.epoch
        for slot in self.slots:
            if slot.was_pruned:  # by the commit, after the last epoch
                slot.end_epoch(row.epoch)
