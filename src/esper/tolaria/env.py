"""One environment: episodes of one growing host, each from the untrained host to the commit.

``step`` is the straight line of one decision: act, train, measure, check, advance, and at the horizon
commit. The environment measures; whoever decides gets facts and the slot table.
"""

import copy
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any, Final

import numpy as np

from esper.kasmina.model import MorphogeneticModel
from esper.leyline.errors import DivergedError, EsperError
from esper.leyline.factored_actions import (
    CANONICAL_ACTION,
    NUM_OPS,
    OP_WAIT,
    Head,
    IntArray,
    canonicalise,
    check_actions,
    heads_read,
)
from esper.leyline.legality import legal_slots_by_op
from esper.leyline.lifecycle_rules import ActionSpace
from esper.leyline.protocols import EventSink, PolicyOutput
from esper.leyline.rows import Row, StageMove
from esper.leyline.signals import EnvFacts
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import Stage
from esper.tolaria import actuator, recording, slot_measurements
from esper.tolaria.counterfactual import Counterfactuals
from esper.tolaria.devices import DEFAULT_COMPUTE, Compute
from esper.tolaria.episode_report import EpisodeReport
from esper.tolaria.epoch import EpochTraining
from esper.tolaria.host_training import HostTraining, train_together
from esper.tolaria.recording import Decision, Place, Reward
from esper.tolaria.recovery import ROLLBACK_LIMIT, Recovery
from esper.tolaria.seeding import EpisodeStreams
from esper.tolaria.tasks.spec import TaskSpec

_COUNTED: Final = ("epoch", "_next_seed_id", "_op_counts", "_refused", "_val_scores", "_val_loss")
"""Attributes that change from step to step."""


class MorphEnv:
    """Episode after episode, each from random streams named by (run, environment, episode, attempt)."""

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
        """``table`` is this environment's row of a shared table; ``enabled`` defaults to all slots.

        An episode ends early with rollback number ``rollback_limit``.
        """
        self.compute = compute
        self.task = task
        self.table = table if table is not None else SlotTable.empty(1, task.num_slots)
        self.sink = sink
        self.episode, self._attempt = -1, 0
        self._rng_seed = rng_seed
        self._env = env
        self._enabled = tuple(enabled) if enabled is not None else (True,) * task.num_slots
        self._rollback_limit = rollback_limit

    # --- a new episode ------------------------------------------------------------------------

    def reset(
        self,
        episode: int = 0,
        *,
        attempt: int = 0,
        iteration: int | None = None,
        twin_scores: Sequence[float] | None = None,
    ) -> EnvFacts:
        """Begin an episode: build, split, and validate the untrained host.

        ``attempt`` counts the breakdowns before it in this episode, ``iteration`` is that of a training it
        belongs to, ``twin_scores`` are the do-nothing twin's validation scores by epoch where known.
        """
        self.episode, self._attempt, self._iteration = episode, attempt, iteration
        self._twin_scores = twin_scores
        streams = EpisodeStreams(self._rng_seed, self._env, episode, attempt, self.compute.device)
        self.host = HostTraining(self.task, self.table, streams, self._enabled, self.compute.amp)
        self._recovery = Recovery(self.host, self.task.objective, self._rollback_limit)
        self.epoch = 0
        self._next_seed_id = 0
        self._op_counts = [0] * NUM_OPS
        self._refused = 0
        self._val_scores: list[float] = []
        """By epoch; the last epoch's is replaced when it is measured again."""
        self._began = time.perf_counter()
        return self._facts(self._measure(), None, OP_WAIT, True)

    @property
    def model(self) -> MorphogeneticModel:
        return self.host.model

    @property
    def action_space(self) -> ActionSpace:
        return self.model.action_space

    @property
    def ended(self) -> bool:
        return self.epoch >= self.task.horizon or self._recovery.given_up

    # --- one step -----------------------------------------------------------------------------

    def step(self, action: IntArray) -> EnvFacts:
        """Carry out ``action [8]``, then train one epoch and check it."""
        self.begin_step(action)
        train_together([self.host])
        return self.end_step()

    def begin_step(self, action: IntArray) -> None:
        """Carry out ``action [8]`` and draw the minibatches of the epoch that follows."""
        began = time.perf_counter()
        self._acted = self._act(action)
        self._seconds = [time.perf_counter() - began]
        self.host.begin_epoch(self.epoch)

    def end_step(self) -> EnvFacts:
        """The minibatches have been trained: measure and check the epoch."""
        op, succeeded = self._acted
        trained = self._end_training()
        times = [time.perf_counter()]
        measured = self._measure()
        if self._recovery.check_epoch(measured, self.epoch, broken=trained.broken):
            self._record_interventions()
            measured = self._measure()
        times.append(time.perf_counter())
        self._record_moves(actuator.advance(self.model))
        if self.ended:
            self._record_moves(self.host.commit())
            measured = self._measure()
        facts = self._facts(measured, trained, op, succeeded and not self._recovery.rolled_back)
        spans = [end - start for start, end in pairwise([*times, time.perf_counter()])]
        self._record_epoch(facts, measured, trained, [*self._seconds, self.host.seconds, *spans])
        return facts

    def _act(self, action: IntArray) -> tuple[int, bool]:
        if self.ended:
            raise RuntimeError("this episode has ended; call reset() for the next one")
        check_actions(action[None], 1, self.table.num_slots)
        alpha = self.table.alpha[:, action[Head.SLOT]]
        canonical = canonicalise(action[None], alpha)
        if self.task.rules.enters_at_once:
            canonical[:, Head.TEMPO] = CANONICAL_ACTION[Head.TEMPO]
        legal = legal_slots_by_op(self.table, self.model.rules)[0]
        outcome = actuator.apply_action(self.model, canonical[0], self._next_seed_id, legal)
        op = int(canonical[0, Head.OP])
        self._op_counts[op] += 1
        self._refused += not outcome.succeeded
        self._decision = Decision(
            place=self._place(),
            action=canonical[0],
            read=heads_read(canonical, alpha)[0],
            forced=not np.delete(legal.any(axis=1), OP_WAIT).any(),
            outcome=outcome,
        )
        self._record_moves(outcome.moves)
        return op, outcome.succeeded

    def _end_training(self) -> EpochTraining:
        trained = self.host.end_epoch(self._recovery)
        self._record_interventions()
        self.epoch += 1
        slot_measurements.record_training(self.table, trained)
        return trained

    def _measure(self) -> Counterfactuals:
        result = self.host.measure(contributions=not self.ended)
        self._val_scores[self.epoch :] = [result.score]
        self._val_loss = result.loss
        slot_measurements.record_worth(self.table, result)
        return result

    def run_out(self) -> EpisodeReport:
        """The rest of the episode with nobody acting, and its report."""
        while not self.ended:
            self.step(np.array(CANONICAL_ACTION))
        return self.finish()

    # --- what is known ------------------------------------------------------------------------

    def _facts(
        self, measured: Counterfactuals, trained: EpochTraining | None, op: int, succeeded: bool
    ) -> EnvFacts:
        if not math.isfinite(measured.loss):
            raise DivergedError(
                f"the validation loss of environment {self._env} is {measured.loss} after epoch {self.epoch},"
                " though nothing is left to return to; lower the learning rate or the gradient clip"
            )
        host, grown = self.model.count_parameters()
        return EnvFacts(
            epoch=self.epoch,
            max_epochs=self.task.horizon,
            train_loss=trained.loss if trained else math.nan,
            train_score=trained.score if trained else math.nan,
            val_loss=measured.loss,
            val_score=measured.score,
            params=host + grown,
            grown_params=grown,
            param_budget=host * self.task.budget_factor,
            host_gradient_norm=trained.host_norm if trained else math.nan,
            last_op=op,
            last_success=succeeded,
            ended=self.ended,
            rolled_back=self._recovery.rolled_back,
            minibatches=self.host.minibatches,
            minibatches_left=self.host.minibatches_left(),
            candidate_cost=self.host.candidate_cost(),
        )

    def finish(self, reward: Reward | None = None) -> EpisodeReport:
        """Read the test split, once, and report the committed network; ``reward`` is the episode's return."""
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
            flops=asdict(self.host.meter.ledger),
            op_counts=tuple(self._op_counts),
            refused=self._refused,
            val_scores=tuple(self._val_scores),
            rollbacks=self._recovery.rollbacks,
            cut_short=self.epoch < self.task.horizon,
        )
        seconds = time.perf_counter() - self._began
        row = recording.episode_row(
            self._place(), report, twin_score=self._twin_score(), seconds=seconds, reward=reward
        )
        self._emit([row])
        return report

    # --- rows ---------------------------------------------------------------------------------

    def _place(self) -> Place:
        return Place(self._env, self.episode, self._attempt, self._iteration, self.epoch)

    def _twin_score(self) -> float | None:
        return None if self._twin_scores is None else self._twin_scores[self.epoch]

    def _emit(self, rows: Iterable[Row]) -> None:
        if self.sink is not None:
            for row in rows:
                self.sink.emit(row)

    def record_decision(self, policy: PolicyOutput | None = None, reward: Reward | None = None) -> None:
        """Emit the row of the last decision, with what its maker and its rewarder know of it."""
        self._emit([recording.decision_row(self._decision, policy, reward)])

    def _record_moves(self, moves: Sequence[StageMove]) -> None:
        """Follow stage moves that have happened."""
        self.host.count(moves)
        self._next_seed_id += sum(move.target is Stage.GERMINATED for move in moves)
        if any(move.target is Stage.FOSSILIZED for move in moves):
            self._recovery.note_fossil()
        self._emit(recording.transition_rows(self._place(), moves, self._last_score()))

    def _record_interventions(self) -> None:
        for intervention in self._recovery.interventions():
            self._emit(recording.transition_rows(self._place(), intervention.moves, self._last_score()))
            self._emit([recording.alert_row(self._place(), intervention)])

    def _last_score(self) -> float | None:
        return self._val_scores[-1] if self._val_scores else None

    def _record_epoch(
        self, facts: EnvFacts, measured: Counterfactuals, trained: EpochTraining, seconds: Sequence[float]
    ) -> None:
        place = self._place()
        self._emit(recording.counterfactual_rows(place, measured, self.table.in_forward[0]))
        row = recording.epoch_row(
            place,
            facts,
            dict(zip(recording.PHASES, seconds, strict=True)),
            twin_score=self._twin_score(),
            learning_rate=self.host.learning_rate,
            skipped_batches=trained.skipped,
            skipped_steps=trained.skipped_steps,
        )
        self._emit([row, *recording.seed_rows(place, self.table)])

    # --- states -------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The whole environment as plain tensors and numbers, to return to bit for bit."""
        return {
            "origin": self._origin(),
            "episode": (self.episode, self._attempt),
            "host": self.host.state(),
            "recovery": self._recovery.state(),
            "counted": copy.deepcopy({name: getattr(self, name) for name in _COUNTED}),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Return to where ``state`` was taken, whatever was done since."""
        if state["origin"] != self._origin():
            # Weights would fit, but data and random streams are drawn anew from these names.
            raise EsperError(f"the snapshot is of {state['origin']}; this one is {self._origin()}")
        episode, attempt = state["episode"]
        if (episode, attempt) != (self.episode, self._attempt):
            self.reset(episode, attempt=attempt)
        self.host.load_state(state["host"])
        self._recovery.load_state(state["recovery"])
        vars(self).update(copy.deepcopy(state["counted"]))
        self.host.close_growth(self.epoch)

    def _origin(self) -> str:
        return f"task {self.task.name}, rng seed {self._rng_seed}, environment {self._env}"
