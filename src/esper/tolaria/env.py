"""One environment: a host, its data and its slots, from the untrained host to the commit.

``step`` is the straight line of one decision: act, train, measure, advance, and at the horizon
commit. The environment measures; whoever decides gets facts and the slot table.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.optim import cosine_rate, set_rate
from esper.leyline.errors import DivergedError, SlotError
from esper.leyline.events import Row, StageMove
from esper.leyline.factored_actions import NUM_OPS, OP_WAIT, Head, IntArray, canonicalise, check_actions
from esper.leyline.legality import legal_slots_by_op
from esper.leyline.protocols import EventSink, PolicyOutput
from esper.leyline.rules import ActionSpace
from esper.leyline.signals import EnvFacts
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import Stage
from esper.tolaria import actuator, recording, slot_measurements
from esper.tolaria.calibration import recalibrate
from esper.tolaria.counterfactual import Counterfactuals, measure
from esper.tolaria.data import BatchCursor, shifted_and_flipped
from esper.tolaria.epoch import EpochTraining, train_epoch
from esper.tolaria.flops import FlopMeter
from esper.tolaria.recovery import ROLLBACK_LIMIT, Recovery
from esper.tolaria.seeding import EpisodeStreams
from esper.tolaria.tasks.spec import Instance, TaskSpec


class DiscardSink:
    """A sink for environments that nobody watches."""

    def emit(self, row: Row) -> None:
        """Drop the row."""


@dataclass(frozen=True, slots=True)
class EpisodeReport:
    """What a finished episode came to; all scores are of the committed network."""

    val_score: float
    test_score: float
    best_val_score: float
    host_params: int
    params: int
    host_flops_per_sample: int
    flops_per_sample: int
    """Forward pass of the bare host, and of the committed network."""
    flops: dict[str, int]
    op_counts: tuple[int, ...]
    refused: int
    val_scores: tuple[float, ...]
    """Validation score after every epoch, the untrained host's first."""
    rollbacks: int
    cut_short: bool
    """Too many rollbacks ended the episode before its horizon."""


class MorphEnv:
    """An episode after host episode, each from streams named by (run, environment, episode)."""

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
    ) -> None:
        """``table`` is this environment's row of a shared table; ``enabled`` defaults to all slots.

        An episode ends early with rollback number ``rollback_limit``.
        """
        self.task = task
        self.rng_seed = rng_seed
        self.env = env
        self.table = table if table is not None else SlotTable.empty(1, task.num_slots)
        self.enabled = tuple(enabled) if enabled is not None else (True,) * task.num_slots
        self.sink: EventSink = sink if sink is not None else DiscardSink()
        self.twin_scores: Sequence[float] | None = None
        """The do-nothing twin's validation score by epoch, where it is known."""
        self.policy_output: PolicyOutput | None = None
        """What is known of the coming decision, where its maker says so."""
        self.episode = -1
        self.attempt = 0
        self.iteration: int | None = None
        """Of the training that this episode belongs to, where it belongs to one."""
        self._rollback_limit = rollback_limit

    # --- a new episode ---------------------------------------------------------------------------

    def reset(self, episode: int = 0, attempt: int = 0) -> EnvFacts:
        """Begin episode ``episode``: build, split, and validate the untrained host.

        ``attempt`` counts the breakdowns that came before it.
        """
        self.episode, self.attempt = episode, attempt
        self._streams = EpisodeStreams(self.rng_seed, self.env, episode, attempt)
        instance = self.task.instances.draw(self._streams.generator("instance"))
        self.instance = instance
        self.splits = self.task.load(self._streams.generator("split")).with_less_to_train(instance.data_share)
        self.table.assign(SlotTable.empty(1, self.task.num_slots))
        self.table.enabled[0] = self._enabled(instance)
        with self._streams.torch("init"):
            host = self.task.build_host(instance)
        self.model = MorphogeneticModel(host, self.task.rules, table=self.table, streams=self._streams.slot)
        self.optimiser = self.task.build_optimiser(host.parameters(), instance.learning_rate)
        self.model.bind_optimiser(self.optimiser)
        self.cursor = BatchCursor(
            len(self.splits.train), self.task.batch_size, self._streams.generator("batches")
        )
        self.guess_loss = self.splits.guess_loss()
        """What the governor and the rewards measure losses by."""
        self.begin_streams()
        self.sampling = self._streams.generator("counterfactual")
        self.augmenting = self._streams.generator("augment")
        self.meter = FlopMeter(self.model, self.splits.train.x[0])
        self.learning_rate = instance.learning_rate
        self._start_counting()
        self.recovery = Recovery(self, self._rollback_limit)
        return self._facts(self.measure(), None, OP_WAIT, True)

    def begin_streams(self, *purpose: str) -> None:
        """Streams for what the host and its seeds draw while they train, named by ``purpose``."""
        self.host_stream = self._streams.torch("host", *purpose)
        for index, slot_id in enumerate(self.model.slot_config.slot_ids):
            self.model.slot(index).stream.set_state(self._streams.slot(slot_id, *purpose).get_state())

    def _enabled(self, instance: Instance) -> tuple[bool, ...]:
        """The slots that both the instance and whoever made this environment allow."""
        both = tuple(mine and drawn for mine, drawn in zip(self.enabled, instance.enabled, strict=True))
        if not any(both):
            raise SlotError(
                f"the instance of environment {self.env} enables none of the slots that were asked for;"
                " ask for all slots where instances vary them"
            )
        return both

    def _start_counting(self) -> None:
        self.epoch = 0
        self.next_seed_id = 0
        self.op_counts = [0] * NUM_OPS
        self.refused = 0
        self.val_scores: list[float] = []
        """By epoch; the last epoch's is replaced when the commit measures again."""
        self._began = time.perf_counter()

    @property
    def action_space(self) -> ActionSpace:
        return self.model.action_space

    @property
    def ended(self) -> bool:
        return self.epoch >= self.task.horizon or self.recovery.given_up

    # --- one step -----------------------------------------------------------------------------

    def step(self, action: IntArray) -> EnvFacts:
        """Carry out ``action [8]``, then train one epoch and judge it."""
        self._refuse_after_the_end()
        times = [time.perf_counter()]
        op, succeeded = self._act(action)
        times.append(time.perf_counter())
        trained = self._train()
        times.append(time.perf_counter())
        measured = self.recovery.judge(self.measure(), broken=trained.broken)
        times.append(time.perf_counter())
        self._advance()
        if self.ended:
            measured = self._commit()
        recording.emit_counterfactuals(self, measured)
        stands = succeeded and not self.recovery.rolled_back
        facts = self._facts(measured, trained, op, stands)
        recording.emit_epoch(self, facts, trained, [*times, time.perf_counter()])
        return facts

    def _refuse_after_the_end(self) -> None:
        if self.ended:
            raise RuntimeError("this episode has ended; call reset() for the next one")

    def _act(self, action: IntArray) -> tuple[int, bool]:
        check_actions(action[None], 1, self.table.num_slots)
        alpha = self.table.alpha[:, action[Head.SLOT]]
        canonical = canonicalise(action[None], alpha)
        legal = legal_slots_by_op(self.table, self.model.rules)
        outcome = actuator.apply_action(self.model, canonical[0], self.next_seed_id)
        op = int(canonical[0, Head.OP])
        self.op_counts[op] += 1
        self.refused += not outcome.succeeded
        recording.emit_decision(self, canonical, alpha, legal, outcome)
        self.book(outcome.moves)
        return op, outcome.succeeded

    def _train(self) -> EpochTraining:
        train = self.splits.train
        batches = []
        for _ in range(self.task.batches_per_epoch):
            chosen = self.cursor.next()
            x = train.x[chosen]
            batches.append(
                (shifted_and_flipped(x, self.augmenting) if self.task.augment else x, train.y[chosen])
            )
        with self.host_stream:
            trained = train_epoch(
                self.model,
                self.optimiser,
                batches,
                self.task.objective,
                self,
                clip=self.task.clip,
            )
        actuator.tick(self.model)
        self.epoch += 1
        slot_measurements.record_training(self.table, trained)
        return trained

    def before_batch(self, number: int) -> None:
        """Set every learning rate: cosine to zero at the horizon, the seeds' from their own birth."""
        now = self.epoch + number / self.task.batches_per_epoch
        self.learning_rate = cosine_rate(self.model.recipe.learning_rate, now / self.task.horizon)
        set_rate(self.optimiser, self.learning_rate)
        for slot in self.model.blended + self.model.incubating:
            optimiser = self.model.slot(slot).optimiser
            if optimiser is not None:
                born = self.epoch - int(self.table.age[0, slot])
                progress = (now - born) / (self.task.horizon - born)
                set_rate(optimiser, cosine_rate(self.model.recipe.learning_rate, progress))
        self.meter.trained(self.task.batch_size)

    def measure(self) -> Counterfactuals:
        """Score the network as it stands, and what each seed is worth."""
        validation = self.splits.validation
        watched = [slot for slot in self.model.blended if not self._is_old_fossil(slot)]
        result = measure(
            self.model,
            validation.x,
            validation.y,
            watched,
            self.task.objective,
            self.sampling,
            calibration=self.splits.train.x,
        )
        self.meter.validated(len(validation), result.slots, result.configurations)
        self.val_scores[self.epoch :] = [result.score]
        slot_measurements.record_worth(self.table, result)
        return result

    def _is_old_fossil(self, slot: int) -> bool:
        return bool(
            self.table.stage[0, slot] == Stage.FOSSILIZED
            and self.table.epochs_in_stage[0, slot] > self.model.rules.fossil_watch_epochs
        )

    def _advance(self) -> None:
        self.book(actuator.advance(self.model))

    def _commit(self) -> Counterfactuals:
        """Make the network final, and measure it once more as it will be handed out."""
        moves = actuator.commit(self.model)
        self.book(moves)
        recalibrate(self.model, self.splits.train.x)
        self.splits.test.unlock()
        return self.measure()

    def remove_broken(self, slots: list[int]) -> None:
        self.recovery.remove_broken(slots)

    def remove_guilty(self, x: Tensor, y: Tensor) -> bool:
        return self.recovery.remove_guilty(x, y)

    # --- what is known ------------------------------------------------------------------------

    def book(self, moves: Sequence[StageMove]) -> None:
        """Count and record stage moves that have happened."""
        for move in moves:
            if move.target is Stage.GERMINATED:
                self.next_seed_id += 1
                self.meter.germinated(move.slot)
            elif move.target is Stage.PRUNED:
                self.meter.removed(move.slot)
            elif move.target is Stage.FOSSILIZED:
                self.recovery.note_fossil()
        recording.emit_moves(self, moves)

    def _facts(
        self, measured: Counterfactuals, trained: EpochTraining | None, op: int, succeeded: bool
    ) -> EnvFacts:
        if not math.isfinite(measured.loss):
            raise DivergedError(
                f"the validation loss of environment {self.env} is {measured.loss} after epoch {self.epoch},"
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
            rolled_back=self.recovery.rolled_back,
        )

    def finish(self) -> EpisodeReport:
        """Read the test split, once, and report the committed network."""
        samples = self.splits.test.read()
        self.model.eval()
        with torch.inference_mode():
            scores = self.task.objective.sample_scores(self.model(samples.x), samples.y)
        host, grown = self.model.count_parameters()
        host_flops, flops = self.meter.per_sample()
        report = EpisodeReport(
            val_score=self.val_scores[-1],
            test_score=scores.mean().item(),
            best_val_score=max(self.val_scores),
            host_params=host,
            params=host + grown,
            host_flops_per_sample=host_flops,
            flops_per_sample=flops,
            flops=self.meter.ledger.as_dict(),
            op_counts=tuple(self.op_counts),
            refused=self.refused,
            val_scores=tuple(self.val_scores),
            rollbacks=self.recovery.rollbacks,
            cut_short=self.epoch < self.task.horizon,
        )
        recording.emit_episode(self, report, time.perf_counter() - self._began)
        return report
