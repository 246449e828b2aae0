"""Training of a policy, written to a run directory: telemetry, checkpoints and the best policy."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from esper.files.atomic_write import SaveError, write_durably
from esper.files.row_files import TELEMETRY
from esper.files.writer_lock import LOCK_FILE
from esper.karn.run import read_rows
from esper.leyline import RunDirectoryError, RunRow
from esper.nissa.iteration_journal import IterationJournal
from esper.nissa.writer import RunWriter
from esper.run.factories import describe_run, one_thread, preset_of
from esper.run.row_sink import RowSink
from esper.run.train_checkpoint import CONFIG_FILE, load_latest, save_state
from esper.simic.agent.ppo import PolicyDivergedError
from esper.simic.config import TrainingConfig
from esper.simic.training import exchange
from esper.simic.training.handshake import HandshakeError
from esper.simic.training.trainer import Iteration, Trainer
from esper.tamiyo.policy.checkpoint import TrainedOn, save_policy
from esper.tamiyo.policy.observer import check_capacity
from esper.tolaria.data import digest_of
from esper.tolaria.devices import Compute, device_of
from esper.tolaria.env import MorphEnv
from esper.tolaria.tasks import TaskSpec


def task_of(config: TrainingConfig) -> TaskSpec:
    """Return the task preset with the horizon, slots and lifecycle rules of the training."""
    task = preset_of(config, config.slots)
    check_capacity(task.num_slots, config.capacity or task.num_slots)
    varied = config.vary_slots or task.instances.vary_slots
    return replace(task, instances=replace(task.instances, vary_slots=varied))


def trained_on(config: TrainingConfig) -> TrainedOn:
    """Return the description of the training that is saved with its policy."""
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

    Args:
        config: Configuration of the training.
        directory: Run directory; new, or that of the run to resume.
        resume: Continue from the latest checkpoint in ``directory``.
        refresh: Called whenever rows were written.

    Raises:
        CheckpointError: The run cannot be resumed.
        FinishedRunError: The run to resume is complete.
        PolicyDivergedError: The policy diverged; a checkpoint was saved before.
    """
    with one_thread():
        journal = IterationJournal(directory, config.detail)
        trainer = Trainer(task_of(config), config, journal)
        mark = load_latest(trainer, config, directory) if resume else None
        # Ranks are compared before rank 0 writes.
        _refuse(exchange.unlike_first(trainer.iteration), directory)
        if exchange.rank() != 0:
            journal.begin(exchange.from_first(0.0))
            _check_shared(directory)
            for _ in _iterations(trainer):
                pass  # Only rank 0 writes rows and checkpoints.
            return
        with RunWriter(directory, resume_from=mark, detail=config.detail) as writer:
            journal.begin(exchange.from_first(writer.began))
            _check_shared(directory)
            begun = read_rows(directory, RunRow) if resume else []
            run = begun[0] if begun else _begin(config, directory, trainer)
            telemetry = RowSink(run, writer)
            if begun:
                telemetry.replay(directory)
            else:
                with writer.iteration(0):
                    telemetry.emit(run)
            refresh()

            def save_checkpoint() -> None:
                with writer.checkpoint() as mark:
                    save_state(trainer, directory, mark)

            def save_best() -> None:
                save_policy(trainer.policy, directory / "best", trained_on(config))

            try:
                for iteration in _iterations(trainer):
                    with writer.iteration(trainer.iteration, is_last=trainer.is_over):
                        telemetry.emit_iteration(iteration.rows, iteration.update)
                    refresh()
                    reached = iteration.update.evaluation_return
                    if reached is not None and reached > trainer.best_return:
                        kept = _attempt(save_best, trainer, directory)
                        trainer.best_return = reached if kept else trainer.best_return
                    if trainer.iteration % config.checkpoint_every == 0 or trainer.is_over:
                        _attempt(save_checkpoint, trainer, directory)
            except PolicyDivergedError:
                _attempt(save_checkpoint, trainer, directory)
                raise


def _iterations(trainer: Trainer) -> Iterator[Iteration]:
    """Run the remaining iterations; raise an error if the policies of two ranks differ after an iteration."""
    for iteration in trainer:
        if exchange.world_size() > 1:
            unlike = exchange.unlike_first(digest_of(*trainer.policy.state_dict().values()))
            if unlike:
                raise HandshakeError(
                    f"after iteration {trainer.iteration} the policy of rank {_listed(unlike)} is not that of"
                    " rank 0, since their processors compute differently; use machines of one kind"
                )
        yield iteration


def _check_shared(directory: Path) -> None:
    """Raise an error if the run directory, which rank 0 has locked, is not visible to this rank."""
    if exchange.world_size() == 1:
        return
    lock, nonce = directory / TELEMETRY / LOCK_FILE, uuid4().hex
    if exchange.rank() == 0:
        lock.write_text(nonce)
    nonce = exchange.from_first(nonce)
    seen = lock.read_text() if lock.exists() else None
    _refuse(exchange.unlike_first(seen == nonce), directory)


def _refuse(ranks: Sequence[int], directory: Path) -> None:
    if ranks:
        raise RunDirectoryError(
            f"rank {_listed(ranks)} does not see the run directory '{directory}' as rank 0 does; name one"
            " that all machines share"
        )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _attempt(save: Callable[[], None], trainer: Trainer, directory: Path) -> bool:
    """Save a checkpoint and return whether saving succeeded; a failure raises only at the end of the
    training.
    """
    try:
        save()
    except SaveError as error:
        intact = f"{error}; what was saved before is intact"
        if trainer.is_over:
            resume = f"esper train --resume {directory}"
            raise SaveError(f"{intact}: make room, then go on with {resume}") from None
        sys.stderr.write(f"esper: {intact}, and the training continues\n")
        return False
    return True


def _begin(config: TrainingConfig, directory: Path, trainer: Trainer) -> RunRow:
    write_durably(directory / CONFIG_FILE, (config.model_dump_json(indent=1) + "\n").encode())
    compute = Compute(device_of(0, config.devices), config.amp)
    env = MorphEnv(trainer.task, rng_seed=config.rng_seed, compute=compute)
    env.reset(0)
    return describe_run(config, "ppo", directory.name, env)
