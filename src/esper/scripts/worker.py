"""``esper train`` in a process that torchrun started: one of several processes that share a policy training.

torchrun restarts all processes when one of them dies, and the training resumes from its last checkpoint.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from esper.files.atomic_write import write_durably
from esper.files.row_files import TELEMETRY
from esper.leyline import EsperError
from esper.run import provenance
from esper.run.policy_training import task_of, train
from esper.run.train_checkpoint import FinishedRunError
from esper.scripts.guard import INTERRUPTED, USAGE_ERROR, exit_on_error
from esper.scripts.launcher import LOST_OTHERS, SENTENCES_VARIABLE
from esper.scripts.train_command import check_processes, interrupted, print_best, train_and_show
from esper.simic.config import TrainingConfig
from esper.simic.training import exchange

ARRIVAL_VARIABLE = "ESPER_ARRIVAL_SECONDS"
ARRIVAL_SECONDS = 300.0
"""Seconds that a process waits at the start for the other processes of the training."""
BEGUN = "begun"
"""Key in torchrun's store that marks a run as begun; the store survives restarts of processes."""


class LostProcessError(EsperError):
    """Error: another process of the training has ended."""


def work(config: TrainingConfig, directory: Path, *, resume: bool) -> NoReturn:
    """Run one of several processes of a policy training, then end this process by ``os._exit``.

    A regular exit would join threads of gloo, which can abort while they wait for processes that have ended.
    """
    if SENTENCES_VARIABLE not in os.environ:
        speak_when_stopped(directory)
    _end_with(lambda: _leave_sentence(config, directory, resume))


def _end_with(command: Callable[[], None]) -> NoReturn:
    code: object = 0
    try:
        exit_on_error(command)
    except SystemExit as end:
        code = end.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else USAGE_ERROR)


def speak_when_stopped(directory: Path) -> None:
    """Print how to resume the training when torchrun stops this process, for example after the loss of
    torchrun's store.

    Python runs no signal handler while the main thread waits in gloo, so another thread waits for SIGTERM.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    signal.signal(signal.SIGTERM, lambda *_: None)

    def stop() -> None:
        raise LostProcessError(f"torchrun stopped this process; {_way_on(directory)}")

    def wait() -> None:
        while os.read(reading, 1) != bytes([signal.SIGTERM]):
            pass
        _end_with(stop)

    threading.Thread(target=wait, daemon=True).start()


def _way_on(directory: Path) -> str:
    go_on = f"go on from the last checkpoint, on any number of machines, with --resume {directory}"
    return f"if torchrun does not start all of them again, {go_on} in place of other flags"


def _leave_sentence(config: TrainingConfig, directory: Path, resume: bool) -> None:
    """Train a policy; if an error occurs, write its message to a file, which the parent process ``esper
    train`` prints.
    """
    folder = os.environ.get(SENTENCES_VARIABLE)
    try:
        _take_part(config, directory, resume)
        if folder is None and exchange.rank() == 0:
            print_best(directory)
    except KeyboardInterrupt:
        if folder is None:
            raise interrupted(directory) from None
        sys.exit(INTERRUPTED)
    except EsperError as error:
        if folder is None:
            raise
        if isinstance(error, LostProcessError):
            sys.exit(LOST_OTHERS)
        write_durably(Path(folder) / os.environ["RANK"], str(error).encode())
        sys.exit(USAGE_ERROR)


def _take_part(config: TrainingConfig, directory: Path, resume: bool) -> None:
    store = _meet(config)
    check_processes(exchange.world_size(), config)
    is_first = exchange.rank() == 0
    try:
        again = exchange.from_first(is_first and _begun_before(store, directory, resume))
        resume = exchange.from_first(resume or (again and (directory / TELEMETRY).is_dir()))
        (train_and_show if is_first else train)(config, directory, resume=resume)
    except FinishedRunError:
        if not again:
            raise
    except RuntimeError as error:
        if "gloo" not in str(error) and not isinstance(error, DistNetworkError):
            raise
        raise LostProcessError(f"another process of the run is gone; {_way_on(directory)}") from None


def _meet(config: TrainingConfig) -> Store:
    """Connect to the other processes of the training; raise an error if they do not connect in time."""
    try:
        seconds = float(os.environ.get(ARRIVAL_VARIABLE, ARRIVAL_SECONDS))
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=seconds)))
        exchange.join(store, rank, size, _common(config), seconds)
    except (RuntimeError, ValueError, exchange.HandshakeError) as error:
        reason = str(error).splitlines()[0]
        raise EsperError(f"the processes of the run did not come together: {reason}") from None
    return store


def _common(config: TrainingConfig) -> dict[str, object]:
    """Return the settings and versions that must be equal in all processes, because their policies would
    differ otherwise.
    """
    hardware = provenance.hardware()
    return {
        **config.model_dump(mode="json"),
        **provenance.versions(),
        "git_revision": provenance.git_revision(),
        "data": task_of(config).digest(),
        **{name: hardware[name] for name in ("machine", "system", "cpu_capability")},
    }


def _begun_before(store: Store, directory: Path, resume: bool) -> bool:
    """Return whether earlier processes of this torchrun began the run; otherwise mark the run as begun.

    A run in a non-empty directory is marked as begun only if it is to be resumed, because torchrun also
    restarts processes that refused to run.
    """
    if store.check([BEGUN]):
        return True
    if resume or not directory.exists() or not any(directory.iterdir()):
        store.set(BEGUN, str(directory))
    return False
