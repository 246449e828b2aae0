"""Training of a policy, written to a run directory: telemetry, checkpoints and the best policy."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from esper.files.atomic_write import write_durably
from esper.files.row_files import TELEMETRY
from esper.files.writer_lock import signature
from esper.karn.run import read_rows
from esper.leyline import RunDirectoryError, RunRow
from esper.nissa.iteration_journal import IterationJournal
from esper.nissa.writer import RunWriter
from esper.run.checkpoint_file import write_checkpoint
from esper.run.factories import describe_run, one_thread, preset_of
from esper.run.row_sink import RowSink
from esper.run.train_checkpoint import CONFIG_FILE, load_checkpoint
from esper.simic.agent.ppo import PolicyDivergedError
from esper.simic.config import TrainingConfig
from esper.simic.training import exchange
from esper.simic.training.trainer import Iteration, Trainer
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCritic
from esper.tamiyo.policy.checkpoint import TrainedOn, save_policy
from esper.tamiyo.policy.features import check_capacity
from esper.tolaria.data import digest_of
from esper.tolaria.devices import Compute, device_of
from esper.tolaria.env import MorphEnv
from esper.tolaria.tasks import TaskSpec


class _Results:
    """Best policy and checkpoints of a training; a write that fails does not end the training."""

    def __init__(self, trainer: Trainer, writer: RunWriter, directory: Path) -> None:
        self._trainer, self._writer, self._directory = trainer, writer, directory
        self._waiting: tuple[float, FactoredRecurrentActorCritic] | None = None
        """Mean return and copy of the best policy; None once the policy is saved."""

    def keep_if_best(self, reached: float | None) -> None:
        """Save the policy if its mean return is the highest of the training, or the best one that waits."""
        best = self._waiting[0] if self._waiting else self._trainer.best_return
        if reached is not None and reached > best:
            self._waiting = reached, deepcopy(self._trainer.policy)
        for _ in range(2):  # A failed write is tried again, also in the last iteration.
            if self._waiting is not None:
                with self._writer.attempt("best policy"):
                    save_policy(self._waiting[1], self._directory / "best", trained_on(self._trainer.config))
                    self._trainer.best_return, self._waiting = self._waiting[0], None

    def save_checkpoint(self) -> None:
        remedy = f": make room, then go on with esper train --resume {self._directory}"
        with self._writer.attempt("checkpoint", remedy), self._writer.checkpoint() as mark:
            write_checkpoint(self._directory, {**self._trainer.state(), "rows": tuple(mark)})


def task_of(config: TrainingConfig) -> TaskSpec:
    """Return the task preset with the horizon, slots and lifecycle rules of the policy training."""
    task = preset_of(config, config.slots)
    check_capacity(task.num_slots, config.capacity or task.num_slots)
    varied = config.vary_slots or task.instances.vary_slots
    return replace(task, instances=replace(task.instances, vary_slots=varied))


def trained_on(config: TrainingConfig) -> TrainedOn:
    """Return the description of a policy training that is saved with the policy: task, slots, steps and
    rent."""
    task = task_of(config)
    length = (task.num_slots, task.horizon)
    return TrainedOn(config.task, *length, config.rent, config.auto_forward, config.budget)


def train(
    config: TrainingConfig,
    directory: Path,
    *,
    resume: bool = False,
    refresh: Callable[[], None] = lambda: None,
) -> None:
    """Train a policy to the last iteration; every process of a distributed run calls this function, and rank
    0 writes.

    A run directory that cannot be written does not end the training (ADR 0044).

    Args:
        config: Configuration of the policy training.
        directory: Run directory, which must be new unless the training is resumed.
        resume: Whether to continue from the latest checkpoint in ``directory``.
        refresh: Function that is called after rows were written.

    Raises:
        RunDirectoryError: The checkpoint is damaged, or does not match the run to resume.
        FinishedRunError: The run to resume has no iterations left.
        PolicyDivergedError: The policy diverged; a checkpoint was saved before the error was raised.
        SaveError: The training is over, but rows, checkpoint or best policy could not be written.
    """
    with one_thread():
        journal = IterationJournal(directory, config.detail)
        trainer = Trainer(task_of(config), config, journal)
        mark = load_checkpoint(trainer, config, directory) if resume else None
        # Before rank 0 writes, all ranks must have the same number of finished iterations.
        _refuse(exchange.unlike_first(trainer.iteration), directory)
        if exchange.rank() != 0:
            journal.began = exchange.from_first(0.0)
            _check_shared(directory)
            for _ in _iterations(trainer):
                pass  # Only rank 0 writes rows and checkpoints.
            return
        with RunWriter(directory, resume_from=mark, detail=config.detail) as writer:
            journal.began = exchange.from_first(writer.began)
            _check_shared(directory)
            begun = read_rows(directory, RunRow) if resume else []
            run = begun[0] if begun else _begin(config, directory, trainer)
            telemetry = RowSink(run, writer)
            telemetry.begin(directory, is_resumed=bool(begun))
            refresh()

            results = _Results(trainer, writer, directory)
            try:
                for iteration in _iterations(trainer):
                    with writer.iteration(trainer.iteration, is_last=trainer.is_over):
                        telemetry.emit_iteration(iteration.rows, iteration.update)
                    refresh()
                    results.keep_if_best(iteration.update.evaluation_return)
                    if trainer.iteration % config.checkpoint_every == 0 or trainer.is_over:
                        results.save_checkpoint()
            except PolicyDivergedError:
                results.save_checkpoint()
                raise


def _iterations(trainer: Trainer) -> Iterator[Iteration]:
    """Run the remaining iterations; raise an error if the policy of some rank differs from that of rank 0
    after an iteration."""
    for iteration in trainer:
        if exchange.world_size() > 1:
            unlike = exchange.unlike_first(digest_of(*trainer.policy.state_dict().values()))
            if unlike:
                raise exchange.HandshakeError(
                    f"after iteration {trainer.iteration} the policy of rank {_listed(unlike)} is not that of"
                    " rank 0, since their processors compute differently; use machines of one kind"
                )
        yield iteration


def _check_shared(directory: Path) -> None:
    """Raise an error if the run directory, which rank 0 has locked, is not visible to this rank."""
    _refuse(exchange.unlike_first(signature(directory / TELEMETRY)), directory)


def _refuse(ranks: Sequence[int], directory: Path) -> None:
    if ranks:
        raise RunDirectoryError(
            f"rank {_listed(ranks)} does not see the run directory '{directory}' as rank 0 does; name one"
            " that all machines share"
        )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _begin(config: TrainingConfig, directory: Path, trainer: Trainer) -> RunRow:
    write_durably(directory / CONFIG_FILE, (config.model_dump_json(indent=1) + "\n").encode())
    compute = Compute(device_of(0, config.devices), config.amp)
    env = MorphEnv(trainer.task, rng_seed=config.rng_seed, compute=compute)
    env.reset(0)
    return describe_run(config, "ppo", directory.name, env)
