"""Training of one episode's network: model, data, optimiser, random streams, compute."""

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from esper.kasmina import actuator
from esper.kasmina.compute import FlopMeter
from esper.kasmina.contributions import Contributions, Scorer, measure, measuring, score_samples
from esper.kasmina.device_work import DeviceWork, run_alone
from esper.kasmina.dry_run import CALIBRATION_SAMPLES, batch_norms, recalibrate
from esper.kasmina.network import MorphogeneticModel
from esper.kasmina.optimizer_groups import DECAY_SHARE, OptimizerGroups, cosine_rate, wsd_factor
from esper.kasmina.optimizer_state import clone_tree
from esper.kasmina.random_streams import TorchStream
from esper.kasmina.recovery import Recovery
from esper.leyline import HostError, SlotError, SlotTable, Stage, StageMove
from esper.tolaria.batches import BatchCursor, SharedBatchIterator, shifted_and_flipped
from esper.tolaria.data import Samples
from esper.tolaria.devices import Amp, Precision, WorkQueue
from esper.tolaria.minibatch import Epoch, EpochTraining, Learner
from esper.tolaria.seeding import EpisodeStreams
from esper.tolaria.tasks.spec import TaskSpec

SEED_WARMUP: Final = 32
"""Number of minibatches over which the learning rate of a new seed rises in a ``wsd`` (warmup-stable-decay)
schedule."""
COUNTERFACTUAL_SHARE: Final = 0.05
"""Largest share of the FLOPs counted against the budget that measurements of contributions may use."""


class HostTraining:
    """Network of one episode with its data, optimiser and compute meter; other classes choose the actions."""

    def __init__(
        self,
        task: TaskSpec,
        table: SlotTable,
        streams: EpisodeStreams,
        enabled: Sequence[bool],
        queue: WorkQueue,
        amp: Amp = "off",
    ) -> None:
        """Draw an instance of the task and build its data, host, optimiser and compute meter.

        Args:
            task: Task of which an instance is drawn.
            table: Row of the slot table for this network; the row is cleared.
            streams: Random streams of the episode.
            enabled: Whether each slot may be used, if the instance of the task enables it too.
            queue: Device, CUDA stream and stopwatch of the environment.
            amp: Precision of training.

        Raises:
            SlotError: No slot is enabled.
            HostError: The budget is smaller than one minibatch per step.
        """
        self._task = task
        self._streams = streams
        self.device = queue.device
        self.precision = Precision(amp, self.device)
        self._queue = queue
        self.instance = task.instances.draw(streams.generator("instance"))
        splits = task.load(streams.generator("split")).with_less_to_train(self.instance.data_share)
        self.guess_loss = splits.guess_loss()
        """Loss of the best constant prediction (class frequencies or mean target), by which other losses are
        scaled."""
        self.splits = splits.on(self.device)
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
        self.model = MorphogeneticModel(
            host, task.rules, sites=task.sites or None, table=table, streams=streams.slot
        )
        self.model.to(self.device.torch)
        self.learning_rate, self.batch_size = (
            self.instance.learning_rate,
            self.instance.batch_size or task.batch_size,
        )
        self.optimiser = task.build_optimiser(host.parameters(), self.learning_rate)
        self._groups = OptimizerGroups(self.optimiser, self.model.host, separate=True)
        self.model.bind(self._groups)
        self._learner = Learner(self.model, self.optimiser, task.objective.loss, task.clip, self.precision)
        self.meter = FlopMeter(self.model, self.splits.train.first(1).x[0])
        self.minibatch_flops = self.meter.minibatch(self.batch_size)
        """FLOPs of a minibatch in the last step, an upper bound of the budget that the step left unspent."""
        self.budget = task.budget_of(self.instance)
        steps, cost = task.horizon, self.minibatch_flops
        if self.budget is not None and self.budget < steps * cost:
            raise HostError(
                f"a budget of {self.budget:,} FLOP gives each of {steps} steps {self.budget // steps:,}, and"
                f" one minibatch of the bare host takes {cost:,}; give {steps * cost:,}, or take fewer steps"
            )
        self.minibatches = 0
        """Number of minibatches trained so far."""
        self._batches_at_birth = [0] * task.num_slots
        """For each slot, the number of minibatches that were trained before its seed was planted."""
        self._cursor = BatchCursor(len(self.splits.train), self.batch_size, streams.generator("batches"))
        self._sampling = streams.generator("counterfactual")
        self._augmenting = streams.generator("augment")
        self.begin_streams()

    def follow_rollback(self, number: int, stayed: Sequence[int]) -> None:
        """Restart the random streams after rollback ``number``, and update the compute meter.

        The FLOPs spent on seeds that the rollback removed are counted as FLOPs of pruned seeds. ``stayed``
        lists the slots whose seeds the rollback has not changed.
        """
        self.begin_streams("rollback", str(number))
        self.meter.follow_model(stayed)

    def batch_loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a minibatch, computed in the precision that is used for training."""
        with self.precision.autocast():
            return self._task.objective.loss(self.model(x), y)

    def begin_streams(self, *purpose: str) -> None:
        """Restart the random streams of host and seeds; ``purpose`` is part of the names of the streams."""
        self._host_stream = self._streams.torch("host", *purpose)
        for slot in self.model.slots:
            assert slot.stream is not None
            slot.stream.set_state(self._streams.slot(slot.site.name, *purpose).get_state())

    # --- one epoch ----------------------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> None:
        """Draw the minibatches of the next epoch, after ``epoch`` finished epochs."""
        self._epoch = epoch
        self.chosen: Sequence[Tensor] = [self._cursor.next() for _ in range(self._affordable(epoch))]
        """Indices, within the training split, of the samples of each minibatch."""
        self._start = self._keep_start()
        self._training = Epoch(self._learner, self._task.objective)
        self._trained = 0
        # model.train() is called only if necessary, because it iterates over all modules.
        if not self.model.training:
            self.model.train()

    def train_minibatch(self, inputs: Tensor, targets: Tensor) -> None:
        """Train on the next minibatch of the epoch without reading a number from the device."""
        with self._queue.entered(inputs, targets), self._host_stream:
            last = self._before_batch(self._trained)
            self._training.train(self._prepared(inputs), targets, last=last)
        self._trained += 1

    def end_epoch(self, recovery: Recovery) -> DeviceWork[EpochTraining]:
        """Read losses and gradient norms of the epoch, and advance the age counters of the slots.

        An epoch with a non-finite loss or gradient is undone and run again with a check of every minibatch.
        """
        trained = yield from self._training.read()
        if not trained.finite:
            self._start()
            batches = ((self._prepared(x), y) for [(_, x, y)] in SharedBatchIterator([self]))
            self._training = Epoch(self._learner, self._task.objective)
            with self._host_stream:
                self._training.train_looking(batches, recovery, self._before_batch)
            trained = yield from self._training.read()
        del self._start
        actuator.tick(self.model)
        self.close_growth(self._epoch + 1)
        return trained

    def _prepared(self, inputs: Tensor) -> Tensor:
        x = self.splits.train.scaled(inputs)
        return shifted_and_flipped(x, self._augmenting) if self._task.augment else x

    def _keep_start(self) -> Callable[[], None]:
        """Return a function that undoes the coming epoch: weights, buffers, optimiser, statistics, streams.

        The returned function may be called once, and only if no seed was planted or removed in between.
        """
        tensors = [tensor.detach() for tensor in chain(self.model.parameters(), self.model.buffers())]
        values = [tensor.clone() for tensor in tensors]
        optimiser, scales = clone_tree(dict(self.optimiser.state)), self.precision.state()
        meter, batches = self.meter.state(), self.minibatches
        slots = (slot.stream for slot in self.model.slots if slot.stream is not None)
        drawn: Sequence[TorchStream | torch.Generator] = (self._host_stream, self._augmenting, *slots)
        streams = [(stream, stream.get_state()) for stream in drawn]

        def restore() -> None:
            torch._foreach_copy_(tensors, values)
            self.optimiser.state.clear()
            self.optimiser.state.update(optimiser)
            self.precision.load_state(scales)
            self.meter.load_state(meter)
            self.minibatches = batches
            for stream, position in streams:
                stream.set_state(position)

        return restore

    def _affordable(self, epoch: int) -> int:
        """Return the number of minibatches that the next step can train from its budget and the unspent
        budget of earlier steps."""
        if self.budget is None:
            return self._task.batches_per_epoch
        allowance = self.budget * (epoch + 1) // self._task.horizon - self.meter.ledger.charged
        self.minibatch_flops = self.meter.minibatch(self.batch_size)
        return max(allowance // self.minibatch_flops, 0)

    def minibatches_left(self) -> float:
        """Return the number of minibatches that the rest of the budget allows; NaN without a budget."""
        if self.budget is None:
            return math.nan
        return (self.budget - self.meter.ledger.charged) / self.meter.minibatch(self.batch_size)

    def candidate_cost(self) -> float:
        """Return the mean compute of a new seed divided by that of the network; NaN without a budget."""
        return math.nan if self.budget is None else self.meter.candidate_cost(self.batch_size)

    def close_growth(self, epoch: int) -> None:
        """Disable all slots in the decay phase of a ``wsd`` (warmup-stable-decay) schedule, because the phase
        is too short for a new seed."""
        task = self._task
        if task.schedule == "wsd" and epoch >= (1.0 - DECAY_SHARE) * task.horizon:
            self.table.enabled[0] = False

    def _before_batch(self, number: int) -> bool:
        """Set all learning rates for minibatch ``number``; return whether this minibatch is the last of the
        epoch."""
        task, base, epoch = self._task, self.instance.learning_rate, self._epoch
        now = epoch + number / len(self.chosen)  # Number of epochs trained so far, not rounded.
        wsd = task.schedule == "wsd"

        def rate(born: int, batches: int, warmup: int) -> float:
            if wsd:
                return base * wsd_factor(now / task.horizon, batches, warmup)
            return cosine_rate(base, (now - born) / (task.horizon - born))

        self.learning_rate = rate(0, self.minibatches, task.warmup)
        self.optimiser.param_groups[0]["lr"] = self.learning_rate
        for slot in self.model.blended + self.model.incubating:
            born = epoch - int(self.table.age[0, slot])
            since_birth = self.minibatches - self._batches_at_birth[slot]
            self._groups.own_group(slot)["lr"] = rate(born, since_birth, SEED_WARMUP)
        self.meter.trained(self.batch_size)
        self.minibatches += 1
        return number == len(self.chosen) - 1

    def measure(self, *, contributions: bool = True) -> Contributions:
        """Return the result of ``measuring`` without deferring the read."""
        return run_alone(self.measuring(contributions=contributions))

    def measuring(self, *, contributions: bool = True) -> DeviceWork[Contributions]:
        """Score the present network and the contributions of its seeds on the validation split.

        With a compute budget, the contribution of a seed is measured when the seed is first blended, and
        again only while measurements have used less than ``COUNTERFACTUAL_SHARE`` of the FLOPs counted
        against the budget.
        """
        validation = self.splits.validation
        watched = [slot for slot in self.model.blended if not self._is_old_fossil(slot)]
        if self.budget is not None and not (contributions and self._may_measure(watched)):
            watched = []
        score = self._scorer(validation)
        only = self.budget is not None
        result = yield from measuring(watched, score, generator=self._sampling, only_contributions=only)
        self.meter.validated(len(validation), result.slots, result.configurations)
        return result

    def validation_error(self) -> float:
        """Return the standard error of the validation loss over the samples of the validation split."""
        present = np.ones((1, 0), dtype=np.bool_)
        _, losses = self._scorer(self.splits.validation)([], present)
        return float(losses.std() / math.sqrt(losses.numel()))

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
        """Update the compute meter and the float16 loss scales after seeds changed their stages."""
        for move in moves:
            self.precision.forget(move.slot)
            if move.target is Stage.GERMINATED:
                self.meter.germinated(move.slot)
                self._batches_at_birth[move.slot] = self.minibatches
            elif move.target is Stage.PRUNED:
                self.meter.removed(move.slot)

    # --- commit and test ----------------------------------------------------------------------

    def commit(self) -> list[StageMove]:
        """Fossilize seeds in HOLDING that pass gate G5, remove other live seeds, unlock the test split."""
        moves = actuator.commit(self.model)
        inputs = self._calibration()
        if inputs is not None:
            recalibrate(self.model, inputs)
        self.splits.test.unlock()
        return moves

    def test(self) -> Contributions:
        """Score the committed network on the test split, which can be read once."""
        return measure([], self._scorer(self.splits.test.read()))

    def _scorer(self, samples: Samples) -> Scorer:
        objective = self._task.objective
        scores, losses = objective.sample_scores, objective.sample_losses
        return score_samples(self.model, samples.x, samples.y, scores, losses, self._calibration())

    def _calibration(self) -> Tensor | None:
        """Return inputs for recomputing BatchNorm statistics; None for a network without BatchNorm."""
        return self.splits.train.first(CALIBRATION_SAMPLES).x if batch_norms(self.model) else None

    # --- states -------------------------------------------------------------------------------

    def weights(self) -> dict[str, Any]:
        """Return weights, seeds, slot table, optimiser state and loss scales, for a rollback."""
        return {
            "model": self.model.state(),
            "optimiser": self._groups.state(),
            "scales": self.precision.state(),
        }

    def load_weights(self, weights: dict[str, Any]) -> None:
        """Restore the state ``weights``, even if seeds were planted or removed since it was saved."""
        self.model.load_state(weights["model"])
        self._groups.load_state(weights["optimiser"], self.model.seed_parameters)
        self.precision.load_state(weights["scales"])

    def state(self) -> dict[str, Any]:
        """Return the complete state of the training as plain tensors and numbers."""
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
        """Restore the complete training state ``state``, bit for bit."""
        self.load_weights(state["weights"])
        self._cursor.load_state(state["cursor"])
        self.splits.test.load_state(state["test"])
        self._host_stream.set_state(state["host_stream"])
        self._sampling.set_state(state["sampling"])
        self._augmenting.set_state(state["augmenting"])
        self.learning_rate = state["learning_rate"]
        self.minibatches, *self._batches_at_birth = state["batches"]
        self.meter.load_state(state["meter"])


def train_together(hosts: Sequence[HostTraining]) -> None:
    """Train one epoch of all hosts, minibatch by minibatch, without waiting for their devices."""
    for gathered in SharedBatchIterator(hosts):
        for env, inputs, targets in gathered:
            hosts[env].train_minibatch(inputs, targets)
