"""What a view knows of a run while it goes on: rows in, the state of one environment's life out.

Rows of other environments are passed over. A row of another episode begins a new life, so lives
may follow each other without end. Every unknown is None.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from esper.leyline.events import (
    DecisionRow,
    EpisodeRow,
    EpochRow,
    LifeRow,
    Row,
    RunRow,
    SeedRow,
    TransitionRow,
)
from esper.leyline.factored_actions import BLUEPRINT_IDS, OP_NAMES, Head
from esper.leyline.stages import OCCUPIED_STAGES, Stage


@dataclass(slots=True)
class SlotState:
    """One slot: what it holds, and the stage it had after each epoch."""

    stage: Stage = Stage.DORMANT
    blueprint: int | None = None
    alpha: float | None = None
    contribution: float | None = None
    contribution_error: float | None = None
    params: int | None = None
    lane: dict[int, Stage] = field(default_factory=dict)
    was_pruned: bool = False
    """Since the last epoch ended; PRUNED lasts no epoch, so the lane would not show it."""

    def empty(self) -> None:
        """Forget the seed; the lane stays."""
        self.blueprint = self.alpha = self.params = None
        self.contribution = self.contribution_error = None

    def take_transition(self, row: TransitionRow) -> None:
        self.stage = Stage(row.to_stage)
        if self.stage is Stage.GERMINATED:
            self.empty()
            self.blueprint = row.blueprint
        elif self.stage is Stage.PRUNED:
            self.was_pruned = True
        if self.stage not in OCCUPIED_STAGES:
            self.empty()

    def take_seed(self, row: SeedRow) -> None:
        self.stage = Stage(row.stage)
        self.blueprint, self.alpha, self.params = row.blueprint, row.alpha, row.params
        self.contribution, self.contribution_error = row.contribution, row.contribution_error
        if self.lane.get(row.epoch, Stage.PRUNED) is not Stage.PRUNED:
            self.lane[row.epoch] = self.stage

    def end_epoch(self, epoch: int) -> None:
        self.lane[epoch] = Stage.PRUNED if self.was_pruned else self.stage
        self.was_pruned = False


@dataclass(slots=True)
class LifeState:
    """One host life."""

    began: float
    episode: int
    epoch: int = 0
    latest: EpochRow | None = None
    scores: dict[int, float] = field(default_factory=dict)
    """By epoch; ``twin_scores`` likewise."""
    twin_scores: dict[int, float] = field(default_factory=dict)
    slots: list[SlotState] = field(default_factory=list)
    transitions: list[TransitionRow] = field(default_factory=list)
    ops: Counter[int] = field(default_factory=Counter)
    refused: int = 0
    result: EpisodeRow | None = None

    @property
    def best_score(self) -> float | None:
        return max(self.scores.values(), default=None)

    def slot(self, index: int) -> SlotState:
        while len(self.slots) <= index:
            self.slots.append(SlotState())
        return self.slots[index]

    def take_epoch(self, row: EpochRow) -> None:
        self.epoch, self.latest = row.epoch, row
        self.scores[row.epoch] = row.val_score
        if row.twin_score is not None:
            self.twin_scores[row.epoch] = row.twin_score
        for slot in self.slots:
            slot.end_epoch(row.epoch)


@dataclass(slots=True)
class Following:
    """The run and the present life of the environment that is followed."""

    max_epochs: int
    env: int = 0
    now: float = 0.0
    run: RunRow | None = None
    life: LifeState | None = None

    def take(self, row: Row, now: float) -> bool:
        """Take one row at time ``now`` (seconds of any clock); False if it is not followed."""
        self.now = now
        if isinstance(row, RunRow):
            self.run, self.life = row, None
            return True
        if not isinstance(row, LifeRow) or row.env != self.env:
            return False
        self._take_life_row(row, self._life_of(row))
        return True

    def _life_of(self, row: LifeRow) -> LifeState:
        if self.life is None or self.life.episode != row.episode:
            self.life = LifeState(began=self.now, episode=row.episode)
            if self.run is not None:
                self.life.slots = [SlotState() for _ in self.run.slots]
        return self.life

    @staticmethod
    def _take_life_row(row: LifeRow, life: LifeState) -> None:
        match row:
            case EpochRow():
                life.take_epoch(row)
            case SeedRow():
                life.slot(row.slot).take_seed(row)
            case TransitionRow():
                life.slot(row.slot).take_transition(row)
                life.transitions.append(row)
            case DecisionRow():
                life.ops[row.action[Head.OP]] += 1
                life.refused += not row.succeeded
            case EpisodeRow():
                life.result = row

    @property
    def elapsed(self) -> float:
        """Seconds since the present life began."""
        return 0.0 if self.life is None else self.now - self.life.began

    @property
    def left(self) -> float | None:
        """Seconds until the present life ends, if it goes on at its own pace so far."""
        if self.life is None or self.life.epoch == 0:
            return None
        return self.elapsed / self.life.epoch * max(self.max_epochs - self.life.epoch, 0)

    def slot_name(self, index: int) -> str:
        return self.run.slots[index] if self.run is not None else f"slot{index}"

    def blueprint_name(self, index: int) -> str:
        return (self.run.blueprints if self.run is not None else BLUEPRINT_IDS)[index]

    def op_name(self, index: int) -> str:
        return (self.run.ops if self.run is not None else OP_NAMES)[index]
