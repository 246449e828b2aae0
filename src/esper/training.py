"""Runs a training: from a configuration to a directory with telemetry, checkpoints and the best policy."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from esper.build import describe_run, one_thread, preset_of
from esper.karn.run import read_rows
from esper.kasmina.native import kernels
from esper.leyline.durable import SaveError, write_durably
from esper.leyline.errors import RunDirectoryError
from esper.leyline.events import RunRow
from esper.leyline.lock import LOCK_FILE
from esper.leyline.run_files import TELEMETRY
from esper.nissa.iteration_journal import IterationJournal
from esper.nissa.writer import RunWriter
from esper.run_state import CONFIG_FILE, load_latest, save_state
from esper.simic.agent.ppo import PolicyDivergedError
from esper.simic.config import TrainingConfig
from esper.simic.training import exchange
from esper.simic.training.meeting import MeetingError
from esper.simic.training.vectorized import Iteration, Trainer
from esper.tamiyo.policy.checkpoint import TrainedOn, save_policy
from esper.tamiyo.policy.observer import check_capacity
from esper.telemetry import Telemetry
from esper.tolaria.data import digest_of
from esper.tolaria.devices import Compute, device_of
from esper.tolaria.env import MorphEnv
from esper.tolaria.tasks import TaskSpec


def task_of(config: TrainingConfig) -> TaskSpec:
    """The preset with the training's own horizon, slots and lifecycle rules."""
    task = preset_of(config, config.slots)
    check_capacity(task.num_slots, config.capacity or task.num_slots)
    varied = config.vary_slots or task.instances.vary_slots
    return replace(task, instances=replace(task.instances, vary_slots=varied))


def trained_on(config: TrainingConfig) -> TrainedOn:
    """What a policy says of its training."""
    task = task_of(config)
    length = (task.num_slots, task.horizon, config.rent)
    return TrainedOn(config.task, *length, config.auto_forward, config.budget)


def train(
    config: TrainingConfig,
    directory: Path,
    *,
    resume: bool = False,
    refresh: Callable[[], None] = lambda: None,
) -> None:
    """Train to the last iteration; every process of the run calls this, the first one writes and shows.

    ``refresh`` is called whenever rows were written.
    """
    with one_thread():
        journal = IterationJournal(directory, config.detail)
        trainer = Trainer(task_of(config), config, journal)
        mark = load_latest(trainer, config, directory) if resume else None
        _refuse(exchange.unlike_first(trainer.iteration), directory)  # all have read it before one writes
        if exchange.rank() != 0:
            journal.begin(exchange.from_first(0.0))
            _check_shared(directory)
            for _ in _iterations(trainer):
                pass  # the first process records and saves
            return
        with RunWriter(directory, resume_from=mark, detail=config.detail) as writer:
            journal.begin(exchange.from_first(writer.began))
            _check_shared(directory)
            begun = _begun(directory) if resume else []
            run = begun[0] if begun else _begin(config, directory, trainer)
            telemetry = Telemetry(run, writer)
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


def _begun(directory: Path) -> list[RunRow]:
    """The row of a run that is resumed; says if it will not go on bit for bit."""
    found = read_rows(directory, RunRow)
    before, here = (found[0].hardware.get("kernels") if found else None), kernels().description
    if before not in (None, here):  # a run from before there was a choice does not name its kernels
        sys.stderr.write(
            f"esper: the run began with kernels that were {before}, here they are {here}: what follows is"
            " right, but not bit for bit what it would have been\n"
        )
    return found


def _iterations(trainer: Trainer) -> Iterator[Iteration]:
    """Run the iterations that are left; all processes must come to the same policy by themselves."""
    for iteration in trainer:
        if exchange.world_size() > 1:
            unlike = exchange.unlike_first(digest_of(*trainer.policy.state_dict().values()))
            if unlike:
                raise MeetingError(
                    f"after iteration {trainer.iteration} the policy of rank {_listed(unlike)} is not that of"
                    " rank 0, since their processors compute differently; use machines of one kind"
                )
        yield iteration


def _check_shared(directory: Path) -> None:
    """Refuse a run directory that some process does not see; the first one holds its lock by now."""
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
    """Save if that is possible; a full disk ends no training but one of which nothing else is left to do."""
    try:
        save()
    except SaveError as error:
        intact = f"{error}; what was saved before is intact"
        if trainer.is_over:
            resume = f"esper train --resume {directory}"
            raise SaveError(f"{intact}: make room, then go on with {resume}") from None
        sys.stderr.write(f"esper: {intact}, and the training goes on\n")
        return False
    return True


def _begin(config: TrainingConfig, directory: Path, trainer: Trainer) -> RunRow:
    write_durably(directory / CONFIG_FILE, (config.model_dump_json(indent=1) + "\n").encode())
    compute = Compute(device_of(0, config.devices), config.amp)
    env = MorphEnv(trainer.task, rng_seed=config.rng_seed, compute=compute)
    env.reset(0)
    return describe_run(config, "ppo", directory.name, env)
