"""The network of one episode while it trains: model, data, optimisers, random streams, counted compute."""

import copy
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.optim import DECAY_SHARE, cosine_rate, set_rate, wsd_factor
from esper.leyline.errors import HostError, SlotError
from esper.leyline.events import StageMove
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import Stage
from esper.tolaria import actuator
from esper.tolaria.calibration import recalibrate
from esper.tolaria.counterfactual import Counterfactuals, measure
from esper.tolaria.data import BatchCursor, shifted_and_flipped
from esper.tolaria.epoch import EpochTraining, Supervisor, train_epoch
from esper.tolaria.flops import FlopMeter
from esper.tolaria.seeding import EpisodeStreams
from esper.tolaria.tasks.spec import TaskSpec

SEED_WARMUP: Final = 32
"""Minibatches over which the rate of a new seed rises in a ``wsd`` schedule."""
COUNTERFACTUAL_SHARE: Final = 0.05
"""Of a budget, for finding out what the seeds contribute."""


class HostTraining:
    """Builds the host of an episode, trains it epoch by epoch and measures it; decides nothing."""

    def __init__(
        self, task: TaskSpec, table: SlotTable, streams: EpisodeStreams, enabled: Sequence[bool]
    ) -> None:
        """``table`` is the environment's row and begins anew; ``enabled`` are the slots it may use."""
        self._task = task
        self._streams = streams
        self.instance = task.instances.draw(streams.generator("instance"))
        self.splits = task.load(streams.generator("split")).with_less_to_train(self.instance.data_share)
        self.table = table
        table.assign(SlotTable.empty(1, task.num_slots))
        table.enabled[0] = np.logical_and(enabled, self.instance.enabled)
        if not table.enabled.any():
            raise SlotError(
                f"the instance of environment {streams.env} enables none of the slots that were asked for;"
                " ask for all slots where instances vary them"
            )
        with streams.torch("init"):
            host = task.build_host(self.instance)
        self.model = MorphogeneticModel(host, task.rules, table=table, streams=streams.slot)
        self.learning_rate = self.instance.learning_rate
        self.optimiser = task.build_optimiser(host.parameters(), self.learning_rate)
        self.model.bind_optimiser(self.optimiser)
        self.meter = FlopMeter(self.model, self.splits.train.x[0])
        self.guess_loss = self.splits.guess_loss()
        """Loss of a blind guess: what the governor and the rewards measure losses by."""
        self.minibatch_flops = self.meter.minibatch(task.batch_size)
        """Of the last step's network; what a budget leaves over is less."""
        self.budget = task.budget_of(self.instance)
        self._check_budget()
        self.minibatches = 0
        """Trained so far, and at the birth of each slot's seed."""
        self._batches_at_birth = [0] * task.num_slots
        self._cursor = BatchCursor(len(self.splits.train), task.batch_size, streams.generator("batches"))
        self._sampling = streams.generator("counterfactual")
        self._augmenting = streams.generator("augment")
        self.begin_streams()

    def _check_budget(self) -> None:
        budget, steps, cost = self.budget, self._task.horizon, self.minibatch_flops
        if budget is not None and budget < steps * cost:
            raise HostError(
                f"a budget of {budget:,} FLOP gives each of {steps} steps {budget // steps:,}, and one"
                f" minibatch of the bare host takes {cost:,}; give {steps * cost:,}, or take fewer steps"
            )

    def begin_streams(self, *purpose: str) -> None:
        """Streams for what the host and its seeds draw while they train, named by ``purpose``."""
        self._host_stream = self._streams.torch("host", *purpose)
        for index, slot_id in enumerate(self.model.slot_config.slot_ids):
            self.model.slot(index).stream.set_state(self._streams.slot(slot_id, *purpose).get_state())

    # --- one epoch ----------------------------------------------------------------------------

    def train_epoch(self, epoch: int, supervisor: Supervisor) -> EpochTraining:
        """Train for one epoch after ``epoch`` finished ones, and tick the slots' counters."""
        train, task = self.splits.train, self._task
        batches, count = [], self._affordable(epoch)
        for _ in range(count):
            chosen = self._cursor.next()
            x = train.x[chosen]
            batches.append((shifted_and_flipped(x, self._augmenting) if task.augment else x, train.y[chosen]))
        with self._host_stream:
            trained = train_epoch(
                self.model,
                self.optimiser,
                batches,
                task.objective,
                supervisor,
                clip=task.clip,
                before_batch=lambda number: self._before_batch(epoch, epoch + number / count),
            )
        actuator.tick(self.model)
        self.close_growth(epoch + 1)
        return trained

    def _affordable(self, epoch: int) -> int:
        """Minibatches of the step after ``epoch`` steps; what a budget leaves over, the next step gets."""
        if self.budget is None:
            return self._task.batches_per_epoch
        allowance = self.budget * (epoch + 1) // self._task.horizon - self.meter.ledger.charged
        self.minibatch_flops = self.meter.minibatch(self._task.batch_size)
        return max(allowance // self.minibatch_flops, 0)

    def minibatches_left(self) -> float:
        """Of the network as it stands, for what is left of the budget; NaN where there is none."""
        if self.budget is None:
            return math.nan
        return (self.budget - self.meter.ledger.charged) / self.meter.minibatch(self._task.batch_size)

    def candidate_cost(self) -> float:
        """Of a seed that can be planted, by the network's own; NaN where there is no budget."""
        return math.nan if self.budget is None else self.meter.candidate_cost(self._task.batch_size)

    def close_growth(self, epoch: int) -> None:
        """What is planted while the rate of a ``wsd`` schedule falls could no longer learn."""
        task = self._task
        if task.schedule == "wsd" and epoch >= (1.0 - DECAY_SHARE) * task.horizon:
            self.table.enabled[0] = False

    def _before_batch(self, epoch: int, now: float) -> None:
        """Set every learning rate for the minibatch at time ``now``, in steps."""
        task, base = self._task, self.model.recipe.learning_rate
        wsd = task.schedule == "wsd"

        def rate(born: int, batches: int, warmup: int) -> float:
            if wsd:
                return base * wsd_factor(now / task.horizon, batches, warmup)
            return cosine_rate(base, (now - born) / (task.horizon - born))

        self.learning_rate = rate(0, self.minibatches, task.warmup)
        set_rate(self.optimiser, self.learning_rate)
        for slot in self.model.blended + self.model.incubating:
            optimiser = self.model.slot(slot).optimiser
            if optimiser is not None:
                born = epoch - int(self.table.age[0, slot])
                set_rate(optimiser, rate(born, self.minibatches - self._batches_at_birth[slot], SEED_WARMUP))
        self.meter.trained(task.batch_size)
        self.minibatches += 1

    def measure(self, *, contributions: bool = True) -> Counterfactuals:
        """Score the network as it stands on the validation split, and what each seed contributes.

        Under a budget a seed is measured as soon as it takes part, and again when the budget's share for
        that allows it.
        """
        validation = self.splits.validation
        watched = [slot for slot in self.model.blended if not self._is_old_fossil(slot)]
        if self.budget is not None and not (contributions and self._may_measure(watched)):
            watched = []
        result = measure(
            self.model,
            validation.x,
            validation.y,
            watched,
            self._task.objective,
            self._sampling,
            calibration=self.splits.train.x,
            only_contributions=self.budget is not None,
        )
        self.meter.validated(len(validation), result.slots, result.configurations)
        return result

    def _may_measure(self, watched: Sequence[int]) -> bool:
        ledger = self.meter.ledger
        cost = len(watched) * len(self.splits.validation) * self.meter.per_sample()[1]
        affordable = ledger.counterfactual + cost <= COUNTERFACTUAL_SHARE * ledger.charged
        return affordable or not self.table.measured[0, watched].all()

    def _is_old_fossil(self, slot: int) -> bool:
        return bool(
            self.table.stage[0, slot] == Stage.FOSSILIZED
            and self.table.epochs_in_stage[0, slot] > self.model.rules.fossil_watch_epochs
        )

    def count(self, moves: Sequence[StageMove]) -> None:
        """Let the compute meter follow stage moves that have happened."""
        for move in moves:
            if move.target is Stage.GERMINATED:
                self.meter.germinated(move.slot)
                self._batches_at_birth[move.slot] = self.minibatches
            elif move.target is Stage.PRUNED:
                self.meter.removed(move.slot)

    # --- the end ------------------------------------------------------------------------------

    def commit(self) -> list[StageMove]:
        """Make the network final: keep what gate G5 lets pass, remove the rest, unlock the test split."""
        moves = actuator.commit(self.model)
        recalibrate(self.model, self.splits.train.x)
        self.splits.test.unlock()
        return moves

    def test(self) -> Counterfactuals:
        """Score and loss of the committed network on the test split, which can be read once."""
        samples = self.splits.test.read()
        return measure(
            self.model, samples.x, samples.y, [], self._task.objective, calibration=self.splits.train.x
        )

    # --- states -------------------------------------------------------------------------------

    def weights(self) -> dict[str, Any]:
        """Weights, buffers, slot table and optimisers: what a rollback brings back."""
        return {"model": self.model.state(), "optimiser": copy.deepcopy(self.optimiser.state_dict())}

    def load_weights(self, weights: dict[str, Any]) -> None:
        """Return to ``weights``, whatever was done since."""
        self.model.load_state(weights["model"])
        self.optimiser.load_state_dict(copy.deepcopy(weights["optimiser"]))

    def state(self) -> dict[str, Any]:
        """Everything that changes while the host trains, as plain tensors and numbers."""
        return {
            "weights": self.weights(),
            "cursor": self._cursor.state(),
            "test": self.splits.test.state(),
            "host_stream": self._host_stream.get_state(),
            "sampling": self._sampling.get_state(),
            "augmenting": self._augmenting.get_state(),
            "learning_rate": self.learning_rate,
            "batches": [self.minibatches, *self._batches_at_birth],
            "meter": self.meter.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Return to ``state``, bit for bit."""
        self.load_weights(state["weights"])
        self._cursor.load_state(state["cursor"])
        self.splits.test.load_state(state["test"])
        self._host_stream.set_state(state["host_stream"])
        self._sampling.set_state(state["sampling"])
        self._augmenting.set_state(state["augmenting"])
        self.learning_rate = state["learning_rate"]
        self.minibatches, *self._batches_at_birth = state["batches"]
        self.meter.load_state(state["meter"])
