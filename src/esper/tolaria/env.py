"""Environment that trains one growing network per episode, from initial weights to the commit.

``step`` carries out one action, trains an epoch, measures the network, checks for a breakdown, advances the
stages of seeds, and commits at the horizon. The environment returns measurements and updates the slot table;
a controller chooses the actions."""

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from esper.kasmina import actuator
from esper.kasmina.contributions import Contributions, record_contributions
from esper.kasmina.device_work import DeviceWork, run_alone
from esper.kasmina.governor import Governor
from esper.kasmina.network import MorphogeneticModel
from esper.kasmina.recorder import PHASES, Recorder, RowKey
from esper.kasmina.recovery import ROLLBACK_LIMIT, Recovery
from esper.leyline import (
    ActionSpace,
    EnvFacts,
    SeedStateReport,
    SlotTable,
    Stage,
    StageMove,
    legal_slots_by_op,
    report_slots,
)
from esper.leyline.errors import DivergedError, EsperError, IncompatibleSeedError
from esper.leyline.factored_actions import (
    CANONICAL_ACTION,
    NUM_OPS,
    OP_WAIT,
    Head,
    IntArray,
    canonicalise,
    check_actions,
)
from esper.leyline.signals import EventSink, Reward
from esper.tolaria.devices import DEFAULT_COMPUTE, Compute, WorkQueue, run_together
from esper.tolaria.host_training import HostTraining, train_together
from esper.tolaria.minibatch import EpochTraining, record_gradients
from esper.tolaria.seeding import EpisodeStreams
from esper.tolaria.tasks.spec import TaskSpec

_COUNTED: Final = ("epoch", "_next_seed_id", "_val_scores", "_val_loss")
"""Names of the environment's attributes that are stored in its snapshot."""


@dataclass(frozen=True, slots=True)
class EpisodeReport:
    """Scores, sizes and compute of a finished episode; final scores are those of the committed network."""

    val_score: float
    val_loss: float
    test_score: float
    test_loss: float
    best_val_score: float
    host_params: int
    params: int
    host_flops_per_sample: int
    flops_per_sample: int
    """FLOPs of a forward pass per sample, of the host alone and of the committed network."""
    flops: dict[str, int]
    """FLOPs of the episode by purpose of the compute, such as backward passes or validation."""
    op_counts: tuple[int, ...]
    refused: int
    val_scores: tuple[float, ...]
    """Validation scores by epoch; the first is the score of the untrained host."""
    rollbacks: int
    cut_short: bool
    """Whether too many rollbacks ended the episode before its horizon."""


class MorphEnv:
    """Environment of one growing network per episode, built and trained from named random streams."""

    def __init__(
        self,
        task: TaskSpec,
        *,
        rng_seed: int,
        env: int = 0,
        enabled: Sequence[bool] | None = None,
        table: SlotTable | None = None,
        sink: EventSink | None = None,
        rollback_limit: int = ROLLBACK_LIMIT,
        compute: Compute = DEFAULT_COMPUTE,
    ) -> None:
        """Store the settings of the environment; call ``reset`` before the first step.

        Args:
            task: Task, with data, hosts and training settings.
            rng_seed: Root of all random streams of the run.
            env: Number of the environment in the run.
            enabled: Whether each slot may be used; all slots unless given.
            table: Row of a shared slot table for this environment; a new slot table unless given.
            sink: Receiver of the telemetry rows, if any.
            rollback_limit: Number of rollbacks at which an episode ends.
            compute: Device and precision of training.
        """
        self.compute = compute
        self.queue = WorkQueue(compute.device)
        self.task = task
        self.table = table if table is not None else SlotTable.empty(1, task.num_slots)
        self.recorder = Recorder(self.table, self._key)
        self.recorder.sink = sink
        self.episode, self._attempt = -1, 0
        self._rng_seed = rng_seed
        self._env = env
        self._enabled = tuple(enabled) if enabled is not None else (True,) * task.num_slots
        self._rollback_limit = rollback_limit

    # --- begin of an episode ------------------------------------------------------------------

    def reset(
        self,
        episode: int = 0,
        *,
        attempt: int = 0,
        iteration: int | None = None,
        twin_scores: Sequence[float] | None = None,
    ) -> EnvFacts:
        """Begin an episode: build the host, split the data and validate the untrained host.

        Args:
            episode: Number of the episode.
            attempt: Number of earlier attempts at this episode that diverged.
            iteration: Iteration of the policy training, for the telemetry rows.
            twin_scores: Validation scores of the do-nothing twin by epoch, for the telemetry rows.
        """
        self.episode, self._attempt, self._iteration = episode, attempt, iteration
        self._twin_scores = twin_scores
        streams = EpisodeStreams(self._rng_seed, self._env, episode, attempt, self.compute.device)
        self.host = HostTraining(self.task, self.table, streams, self._enabled, self.queue, self.compute.amp)
        governor = Governor(self.host.guess_loss)
        self._recovery = Recovery(self.host, governor, self.host.batch_loss, self._rollback_limit)
        self.epoch = 0
        self._next_seed_id = 0
        self.recorder.load_state({"op_counts": [0] * NUM_OPS, "refused": 0})
        self._val_scores: list[float] = []
        """Validation scores of the episode by epoch; a second measurement of an epoch replaces the first."""
        self._began = time.perf_counter()
        return self._facts(run_alone(self._measuring()), EpochTraining(), OP_WAIT, True)

    @property
    def model(self) -> MorphogeneticModel:
        return self.host.model

    @property
    def action_space(self) -> ActionSpace:
        return self.model.action_space

    @property
    def ended(self) -> bool:
        """Whether the episode has reached its horizon or the limit of rollbacks."""
        return self.epoch >= self.task.horizon or self._recovery.given_up

    # --- one step -----------------------------------------------------------------------------

    def step(self, action: IntArray) -> EnvFacts:
        """Carry out ``action [head]``, then train one epoch and check its losses."""
        [facts] = step_together([(self, action)])
        return facts

    def begin_step(self, action: IntArray) -> None:
        """Carry out ``action [head]`` and draw the minibatches of the epoch that follows."""
        with self.queue.entered():
            self.queue.seconds.clear()
            self.queue.begin("act")
            self._acted = self._act(action)
            self.queue.begin("train")
            self.host.begin_epoch(self.epoch)

    def end_step(self) -> DeviceWork[EnvFacts]:
        """Score the network after the minibatches of an epoch were trained, and check for a breakdown."""
        op, succeeded = self._acted
        trained = yield from self.host.end_epoch(self._recovery)
        self._record_interventions()
        self.epoch += 1
        record_gradients(self.table, trained)
        measured = yield from self._measuring()
        if self._recovery.check_epoch(measured, self.epoch, broken=trained.broken):
            self._record_interventions()
            measured = yield from self._measuring()
        self.queue.begin("rest")
        self._record_moves(actuator.advance(self.model))
        if self.ended:
            self._record_moves(self.host.commit())
            measured = yield from self._measuring()
        facts = self._facts(measured, trained, op, succeeded and not self._recovery.rolled_back)
        self.queue.begin("rest")
        self.recorder.epoch(
            facts,
            measured,
            {phase: self.queue.seconds[phase] for phase in PHASES},
            twin_score=self._twin_score(),
            learning_rate=self.host.learning_rate,
            skipped_batches=trained.skipped,
            skipped_steps=trained.skipped_steps,
        )
        return facts

    def _act(self, action: IntArray) -> tuple[int, bool]:
        if self.ended:
            raise RuntimeError("this episode has ended; call reset() for the next one")
        check_actions(action[None], 1, self.table.num_slots)
        alpha = self.table.alpha[:, action[Head.SLOT]].copy()
        canonical = canonicalise(action[None], alpha)[0]
        if self.task.rules.enters_at_once:
            canonical[Head.TEMPO] = CANONICAL_ACTION[Head.TEMPO]
        legal = legal_slots_by_op(self.table, self.model.rules)[0]
        try:
            outcome = actuator.apply_action(self.model, canonical, self._next_seed_id, legal)
        except IncompatibleSeedError:
            outcome = actuator.Outcome(False, (), "G0", ("seed_compatible",))
        op = int(canonical[Head.OP])
        self.recorder.decided(canonical, alpha, legal, outcome)
        self._record_moves(outcome.moves)
        return op, outcome.succeeded

    def _measuring(self) -> DeviceWork[Contributions]:
        self.queue.begin("measure")
        result = yield from self.host.measuring(contributions=not self.ended)
        self._val_scores[self.epoch :] = [result.score]
        self._val_loss = result.loss
        record_contributions(self.table, result)
        return result

    def run_out(self) -> EpisodeReport:
        """Run the rest of the episode with WAIT at every step and return the report of the episode."""
        while not self.ended:
            self.step(np.array(CANONICAL_ACTION))
        return self.finish()

    # --- facts and report ---------------------------------------------------------------------

    def reports(self) -> list[SeedStateReport]:
        """Return a report of every slot, upstream first: stage, alpha, measurements and gradient health."""
        return report_slots(self.table, 0, self.action_space)

    def _facts(self, measured: Contributions, trained: EpochTraining, op: int, succeeded: bool) -> EnvFacts:
        if not math.isfinite(measured.loss):
            raise DivergedError(
                f"the validation loss of environment {self._env} is {measured.loss} after epoch {self.epoch},"
                " though nothing is left to return to; lower the learning rate or the gradient clip"
            )
        host, grown = self.model.count_parameters()
        return EnvFacts(
            epoch=self.epoch,
            max_epochs=self.task.horizon,
            train_loss=trained.loss,
            train_score=trained.score,
            val_loss=measured.loss,
            val_score=measured.score,
            params=host + grown,
            grown_params=grown,
            param_budget=host * self.task.budget_factor,
            host_gradient_norm=trained.host_norm,
            last_op=op,
            last_success=succeeded,
            ended=self.ended,
            rolled_back=self._recovery.rolled_back,
            minibatches=self.host.minibatches,
            minibatches_left=self.host.minibatches_left(),
            candidate_cost=self.host.candidate_cost(),
        )

    def finish(self, reward: Reward | None = None) -> EpisodeReport:
        """Score the committed network on the test split and return the report, once per episode.

        ``reward``, the sum of the rewards of the episode, is written into the episode's telemetry row.
        """
        host, grown = self.model.count_parameters()
        host_flops, flops = self.host.meter.per_sample()
        test = self.host.test()
        report = EpisodeReport(
            val_score=self._val_scores[-1],
            val_loss=self._val_loss,
            test_score=test.score,
            test_loss=test.loss,
            best_val_score=max(self._val_scores),
            host_params=host,
            params=host + grown,
            host_flops_per_sample=host_flops,
            flops_per_sample=flops,
            flops=self.host.meter.ledger.flops(),
            op_counts=tuple(self.recorder.op_counts),
            refused=self.recorder.refused,
            val_scores=tuple(self._val_scores),
            rollbacks=self._recovery.rollbacks,
            cut_short=self.epoch < self.task.horizon,
        )
        columns = asdict(report) | {
            "twin_val_score": self._twin_score(),
            "ended_by": "governor" if report.cut_short else "horizon",
            "seconds": time.perf_counter() - self._began,
        }
        self.recorder.episode(columns, reward)
        return report

    # --- rows ---------------------------------------------------------------------------------

    def _key(self) -> RowKey:
        return RowKey(self._env, self.episode, self._attempt, self._iteration, self.epoch)

    def _twin_score(self) -> float | None:
        return None if self._twin_scores is None else self._twin_scores[self.epoch]

    def _record_moves(self, moves: Sequence[StageMove]) -> None:
        self.host.count(moves)
        self._next_seed_id += sum(move.target is Stage.GERMINATED for move in moves)
        if any(move.target is Stage.FOSSILIZED for move in moves):
            self._recovery.note_fossil()
        self.recorder.moves(moves, self._last_score())

    def _record_interventions(self) -> None:
        self.recorder.interventions(self._recovery.interventions(), self._last_score())

    def _last_score(self) -> float | None:
        return self._val_scores[-1] if self._val_scores else None

    # --- states -------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return a snapshot of the environment as plain tensors and numbers."""
        return {
            "origin": self._origin(),
            "episode": (self.episode, self._attempt),
            "host": self.host.state(),
            "recovery": self._recovery.state(),
            "counted": copy.deepcopy({name: getattr(self, name) for name in _COUNTED}),
            "recorder": self.recorder.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the environment from a snapshot that ``state`` returned, bit for bit.

        Raises:
            EsperError: The snapshot belongs to another task, rng seed or environment.
        """
        if state["origin"] != self._origin():
            # Weights from a snapshot of another environment would fit, but its data and random streams
            # differ.
            raise EsperError(f"the snapshot is of {state['origin']}; this one is {self._origin()}")
        episode, attempt = state["episode"]
        if (episode, attempt) != (self.episode, self._attempt):
            self.reset(episode, attempt=attempt)
        self.host.load_state(state["host"])
        self._recovery.load_state(state["recovery"])
        vars(self).update(copy.deepcopy(state["counted"]))
        self.recorder.load_state(state["recorder"])
        self.host.close_growth(self.epoch)

    def _origin(self) -> str:
        return f"task {self.task.name}, rng seed {self._rng_seed}, environment {self._env}"


def step_together(steps: Sequence[tuple[MorphEnv, IntArray]]) -> list[EnvFacts]:
    """Run one step of several environments, whose devices compute at the same time.

    Args:
        steps: Environments whose episodes have not ended, each with its action ``[head]``.

    Returns:
        Facts of each environment after the step, which do not depend on the other environments.
    """
    for env, action in steps:
        env.begin_step(action)
    train_together([env.host for env, _ in steps])
    return run_together([(env.queue, env.end_step()) for env, _ in steps])
