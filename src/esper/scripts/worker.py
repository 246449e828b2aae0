"""One of several processes that share a training: what ``esper train`` is where torchrun started it.

torchrun starts all processes again when one of them dies, and the training goes on from its last checkpoint.
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

from esper import provenance
from esper.files.row_files import TELEMETRY
from esper.leyline.errors import EsperError
from esper.run_state import FinishedRunError
from esper.scripts.guard import INTERRUPTED, USAGE_ERROR, exit_on_error
from esper.scripts.launching import LOST_OTHERS, SENTENCES_VARIABLE
from esper.scripts.train_command import check_processes, interrupted, print_best, train_and_show
from esper.simic.training import exchange
from esper.simic.training.handshake import HandshakeError
from esper.simic.training_config import TrainingConfig
from esper.training import task_of, train

ARRIVAL_VARIABLE = "ESPER_ARRIVAL_SECONDS"
ARRIVAL_SECONDS = 300.0
"""How long a process waits for the others at the start."""
BEGUN = "begun"
"""Key of torchrun's store, which outlives the processes: one of them has begun the run."""


class LostProcessError(EsperError):
    """A process of the run is gone."""


def work(config: TrainingConfig, directory: Path, *, resume: bool) -> NoReturn:
    """Take part in a training and end the process, at once.

    To tear down threads of gloo, which may wait for processes that are gone, can abort.
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
    """Say how to go on when torchrun ends this process, as it does when the machine of its store is gone.

    Python runs no handler while the main thread waits for others in gloo, so another thread is told.
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
    """Take part; the sentence of an error is left for ``esper train``, which shows one of all processes'."""
    folder = os.environ.get(SENTENCES_VARIABLE)
    try:
        _take_part(config, directory, resume)
        if folder is None and exchange.rank() == 0:
            print_best(config, directory)
    except KeyboardInterrupt:
        if folder is None:
            raise interrupted(directory) from None
        sys.exit(INTERRUPTED)
    except EsperError as error:
        if folder is None:
            raise
        if isinstance(error, LostProcessError):
            sys.exit(LOST_OTHERS)
        (Path(folder) / os.environ["RANK"]).write_text(str(error))
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
    """Find the other processes; the limit holds here only, since an iteration may well take longer."""
    try:
        seconds = float(os.environ.get(ARRIVAL_VARIABLE, ARRIVAL_SECONDS))
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=seconds)))
        exchange.join(store, rank, size, _common(config), seconds)
    except (RuntimeError, ValueError, HandshakeError) as error:
        reason = str(error).splitlines()[0]
        raise EsperError(f"the processes of the run did not come together: {reason}") from None
    return store


def _common(config: TrainingConfig) -> dict[str, object]:
    """What all processes must have, or each would compute a policy of its own."""
    hardware = provenance.hardware()
    return {
        **config.model_dump(mode="json"),
        **provenance.versions(),
        "git_revision": provenance.git_revision(),
        "data": task_of(config).digest(),
        **{name: hardware[name] for name in ("machine", "system", "cpu_capability", "kernels")},
    }


def _begun_before(store: Store, directory: Path, resume: bool) -> bool:
    """Whether processes of this torchrun, now gone, had begun the run; from now on they have.

    A directory that held something before counts as theirs only if it was to be resumed: torchrun starts
    processes again that were refused, too.
    """
    if store.check([BEGUN]):
        return True
    if resume or not directory.exists() or not any(directory.iterdir()):
        store.set(BEGUN, str(directory))
    return False
