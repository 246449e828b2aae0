"""Generator of telemetry rows for runs in which seeds germinate, blend and end at random.

Tests compute the expected content of a web page or table from the generated rows alone.
"""

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from esper.leyline import HEAD_NAMES, OP_NAMES, LifecycleOp, Stage
from esper.leyline.rows import (
    AlertRow,
    CounterfactualRow,
    DecisionRow,
    EpisodeRow,
    EpochRow,
    Row,
    RunRow,
    UpdateRow,
)
from esper.leyline.stages import COOLING_STAGES, OCCUPIED_STAGES
from esper.nissa.writer import RunWriter
from tests.karn import fake_run

HOST_PARAMS = 174
EMBARGO = 2


@dataclass
class _Slot:
    stage: Stage = Stage.DORMANT
    seed: int = -1
    blueprint: int = -1
    born: int = 0
    since: int = 0
    alpha: float = 0.0


@dataclass
class Episode:
    """Generator of a random episode, with its telemetry rows so far and the current state of its seeds."""

    env: int
    episode: int
    slots: int
    horizon: int
    dice: random.Random
    full: bool = True
    rewarded: bool = False
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._slots = [_Slot() for _ in range(self.slots)]
        self._seeds = 0
        self._score = 10.0

    def _where(self, epoch: int) -> dict[str, int | None]:
        iteration = self.episode + 1 if self.rewarded else None
        return {"env": self.env, "episode": self.episode, "iteration": iteration, "epoch": epoch}

    def _move(self, index: int, epoch: int, target: Stage, cause: str, reason: str) -> None:
        slot = self._slots[index]
        is_gone = slot.stage in COOLING_STAGES
        measured = slot.stage in (Stage.BLENDING, Stage.HOLDING) and epoch > slot.since
        self.rows.append(
            replace(
                fake_run.transition_row(0, 0, slot.stage, target, cause, reason),
                **self._where(epoch),
                slot=index,
                seed=-1 if is_gone else slot.seed,
                blueprint=-1 if is_gone else slot.blueprint,
                score=self._score,
                contribution=self.dice.gauss(3, 4) if measured else None,
                age=epoch - slot.born,
            )
        )
        slot.stage, slot.since = target, epoch

    def _decide(self, epoch: int) -> None:
        free = [i for i, slot in enumerate(self._slots) if slot.stage is Stage.DORMANT]
        held = [i for i, slot in enumerate(self._slots) if slot.stage is Stage.HOLDING]
        blending = [i for i, slot in enumerate(self._slots) if slot.stage is Stage.BLENDING]
        legal = [(LifecycleOp.GERMINATE, i) for i in free] + [(LifecycleOp.FOSSILIZE, i) for i in held]
        legal += [(LifecycleOp.PRUNE, i) for i in blending]
        op, index = self.dice.choice(legal) if legal and self.dice.random() < 0.4 else (LifecycleOp.WAIT, 0)
        succeeded = op is not LifecycleOp.FOSSILIZE or self.dice.random() < 0.8
        terms = {"lead": self.dice.gauss(0.02, 0.05), "rent": -0.001} if self.rewarded else None
        self.rows.append(
            DecisionRow(
                **self._where(epoch),
                action=[int(op), index, 0, 0, 0, 0, 0, 0],
                read=[True, op is not LifecycleOp.WAIT] + [False] * 6,
                forced=not legal,
                succeeded=succeeded,
                refused_by=None if succeeded else "G5",
                failed_checks=[] if succeeded else ["contribution"],
                reward=sum(terms.values()) if terms else None,
                reward_terms=terms,
            )
        )
        if op is LifecycleOp.GERMINATE:
            blueprint = self.dice.randrange(1, 8)
            self._slots[index] = _Slot(seed=self._seeds, blueprint=blueprint, born=epoch)
            self._seeds += 1
            self._move(index, epoch, Stage.GERMINATED, "policy", "germinated")
            self._move(index, epoch, Stage.TRAINING, "mechanical", "incubation begins")
        elif op is LifecycleOp.FOSSILIZE and succeeded:
            self._move(index, epoch, Stage.FOSSILIZED, "policy", "fossilized")
        elif op is LifecycleOp.PRUNE:
            self._move(index, epoch, Stage.PRUNED, "policy", "pruned")
            self._move(index, epoch, Stage.EMBARGOED, "mechanical", "cooling down")

    def _tick(self, epoch: int) -> None:
        for index, slot in enumerate(self._slots):
            if slot.stage is Stage.TRAINING and epoch - slot.since >= 2:
                self._move(index, epoch, Stage.BLENDING, "mechanical", "incubation is over")
                slot.alpha = 0.25
            elif slot.stage is Stage.BLENDING:
                slot.alpha = min(slot.alpha + 0.25, 1.0)
                if slot.alpha == 1.0:
                    self._move(index, epoch, Stage.HOLDING, "mechanical", "full alpha reached")
            elif slot.stage is Stage.EMBARGOED and epoch - slot.since >= EMBARGO:
                self._move(index, epoch, Stage.RESETTING, "mechanical", "embargo is over")
            elif slot.stage is Stage.RESETTING:
                self._move(index, epoch, Stage.DORMANT, "mechanical", "slot is empty again")

    def _params(self) -> int:
        return sum(100 * slot.blueprint for slot in self._slots if slot.stage in OCCUPIED_STAGES)

    def _measure(self, epoch: int) -> None:
        strength = sum(slot.alpha for slot in self._slots if slot.stage in OCCUPIED_STAGES)
        self._score = min(max(self._score + self.dice.gauss(strength, 2.0), 0.0), 100.0)
        for index, slot in enumerate(self._slots):
            if self.full and slot.stage in OCCUPIED_STAGES:
                known = slot.stage is not Stage.TRAINING
                self.rows.append(
                    replace(
                        fake_run.seed_row(0, 4),
                        **self._where(epoch),
                        slot=index,
                        seed=slot.seed,
                        blueprint=slot.blueprint,
                        stage=slot.stage,
                        age=epoch - slot.born,
                        alpha=slot.alpha,
                        contribution=self.dice.gauss(5, 3) if known else None,
                        contribution_error=abs(self.dice.gauss(1, 0.2)) if known else None,
                        params=100 * slot.blueprint,
                    )
                )
        grown = self._params()
        self.rows.append(
            replace(
                fake_run.epoch_row(1),
                **self._where(epoch),
                val_score=self._score,
                twin_score=min(10.0 + 0.2 * epoch, 100.0),
                params=HOST_PARAMS + grown,
                grown_params=grown,
                phase_ms={"act": 1.0, "train": 8.0 + self.dice.random(), "measure": 2.0},
            )
        )

    def _end(self) -> None:
        last = self.horizon
        for index, slot in enumerate(self._slots):
            if slot.stage is Stage.HOLDING:
                self._move(index, last, Stage.FOSSILIZED, "mechanical", "horizon")
            elif slot.stage in (Stage.TRAINING, Stage.BLENDING):
                self._move(index, last, Stage.PRUNED, "mechanical", "horizon")
        live = [i for i, slot in enumerate(self._slots) if slot.stage is Stage.FOSSILIZED][:3]
        for on in itertools.product([False, True], repeat=len(live)) if self.full and live else []:
            states = [slot.stage is Stage.FOSSILIZED for slot in self._slots]
            for index, state in zip(live, on, strict=True):
                states[index] = state
            score = self._score if all(on) else self._score * self.dice.random()
            self.rows.append(CounterfactualRow(**self._where(last), on=states, score=score, loss=1.0))
        decisions = [row for row in self.rows if isinstance(row, DecisionRow)]
        chosen = [row.action[0] for row in decisions]
        terms = [row.reward_terms for row in decisions if row.reward_terms]
        sums = {name: sum(of[name] for of in terms) for name in terms[0]} if terms else None
        params = HOST_PARAMS + self._params()
        self.rows.append(
            replace(
                fake_run.episode_row(),
                **self._where(last),
                val_score=self._score,
                test_score=max(self._score - 1, 0.0),
                twin_val_score=min(10.0 + 0.2 * last, 100.0),
                best_val_score=max(row.val_score for row in self.rows if isinstance(row, EpochRow)),
                host_params=HOST_PARAMS,
                params=params,
                flops={"forward": 1_000_000 * params, "backward": 2_000_000 * params, "pruned_seeds": 5_000},
                op_counts=[chosen.count(op) for op in range(len(OP_NAMES))],
                refused=sum(not row.succeeded for row in decisions),
                total_reward=sum(sums.values()) if sums else None,
                reward_terms=sums,
            )
        )

    def live(self, epochs: int | None = None) -> list[Row]:
        """Return the rows of a finished episode, or of an unfinished episode after ``epochs`` epochs."""
        for epoch in range(self.horizon if epochs is None else epochs):
            self._decide(epoch)
            self._tick(epoch + 1)
            self._measure(epoch + 1)
        if epochs is None:
            self._end()
        return self.rows


def run_row(
    *,
    horizon: int = 20,
    slots: Sequence[str] = ("r0c0", "r0c1", "r0c2"),
    envs: int = 1,
    iterations: int | None = None,
) -> RunRow:
    """Return the run row, the first row of a generated run."""
    config = {"episodes": 1, "nested": {"rate": 0.5}}
    if iterations is not None:
        config = {"iterations": iterations, "target_kl": 0.03}
    controller = "heuristic" if iterations is None else "ppo"
    return replace(
        fake_run.run_row("made", controller, iterations=iterations),
        config=config,
        host_params=HOST_PARAMS,
        slots=list(slots),
        horizon=horizon,
        envs=envs,
    )


def update_row(number: int, episodes: Sequence[EpisodeRow], dice: random.Random) -> UpdateRow:
    """Return a PPO update row; entropies fall with the iteration, and head ``style`` has null entropy at
    times."""
    returns = [episode.total_reward or 0.0 for episode in episodes]
    chosen = [sum(episode.op_counts[op] for episode in episodes) for op in range(len(OP_NAMES))]
    entropy = [
        max(1.0 - 0.004 * number * index + dice.gauss(0, 0.02), 0.0) for index in range(len(HEAD_NAMES))
    ]
    return replace(
        fake_run.update_row(number),
        mean_return=sum(returns) / len(returns),
        reward_terms={
            name: sum((episode.reward_terms or {}).get(name) or 0.0 for episode in episodes) / len(episodes)
            for name in ("lead", "rent")
        },
        val_score=sum(episode.val_score for episode in episodes) / len(episodes),
        params=sum(episode.params for episode in episodes) / len(episodes),
        op_shares=[count / sum(chosen) for count in chosen],
        entropy=2.0 - 0.005 * number,
        head_entropy=[
            min(value, 1.0) if index != 3 or number % 3 else None for index, value in enumerate(entropy)
        ],
        explained_variance=min(dice.gauss(0.4, 0.3), 1.0),
        approx_kl=abs(dice.gauss(0.03, 0.02)),
        clip_fraction=min(abs(dice.gauss(0.2, 0.08)), 1.0),
        evaluation_return=0.5 if number % 5 == 0 else None,
        evaluation_score=min(20.0 + 0.2 * number, 100.0) if number % 5 == 0 else None,
        explosion=None,
        seconds=4.0,
        phase_ms={
            "rollout": 3000.0 + dice.random(),
            "update": 500.0,
            "evaluation": 500.0 * (number % 5 == 0),
        },
    )


def alert_row(rule: str, event: str = "raised", *, scope: str = "run", **where: int) -> AlertRow:
    return AlertRow(
        rule=rule, event=event, severity="warning", scope=scope, value=0.5, limit=0.25, hint="look", **where
    )


def run_rows(
    *, episodes: int = 1, horizon: int = 20, slots: int = 3, full: bool = True, seed: int = 0
) -> list[Row]:
    """Return the telemetry rows of a generated run that trains networks but no policy."""
    names = [f"r0c{index}" for index in range(slots)]
    rows: list[Row] = [run_row(horizon=horizon, slots=names)]
    for episode in range(episodes):
        rows += Episode(0, episode, slots, horizon, random.Random(f"{seed}-{episode}"), full).live()
    return rows


def training_rows(
    *, iterations: int = 3, envs: int = 4, horizon: int = 20, slots: int = 3, full: bool = True, seed: int = 0
) -> list[Row]:
    """Return the telemetry rows of a generated policy training."""
    names = [f"r0c{index}" for index in range(slots)]
    rows: list[Row] = [run_row(horizon=horizon, slots=names, envs=envs, iterations=iterations)]
    for number in range(1, iterations + 1):
        dice = random.Random(f"{seed}-{number}")
        played = [
            Episode(
                env, number - 1, slots, horizon, random.Random(f"{seed}-{number}-{env}"), full, rewarded=True
            )
            for env in range(envs)
        ]
        for episode in played:
            rows += episode.live()
        ended = [row for episode in played for row in episode.rows if isinstance(row, EpisodeRow)]
        rows.append(update_row(number, ended, dice))
    return rows


def write(directory: Path, rows: Iterable[Row], tick: float = 0.01) -> Path:
    """Write telemetry rows with a fake clock that advances ``tick`` seconds per reading."""
    clock = itertools.count()
    with RunWriter(directory, clock=lambda: tick * next(clock)) as writer:
        for row in rows:
            writer.emit(row)
    return directory
