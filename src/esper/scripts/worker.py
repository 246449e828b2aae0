"""One of several processes that share a training run; started by torchrun through ``esper train``."""

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from torch.distributed import DistNetworkError
from torch.distributed.rendezvous import rendezvous

from esper.config import checked, read_settings
from esper.leyline.errors import EsperError
from esper.scripts.guard import INTERRUPTED, USAGE_ERROR, exit_on_error
from esper.scripts.train_command import LOST_OTHERS, SENTENCES_VARIABLE, train_and_show
from esper.simic.config import TrainingConfig
from esper.simic.training import exchange
from esper.training import train

ARRIVAL_VARIABLE = "ESPER_ARRIVAL_SECONDS"
ARRIVAL_SECONDS = 300.0
"""How long a process waits for the others at the start."""


class LostProcessError(EsperError):
    """A process of the run is gone."""


def main() -> None:
    """Arguments: configuration file, run directory, ``start`` or ``resume``."""
    file, directory, how = sys.argv[1:]
    _meet()
    config = checked(TrainingConfig, read_settings(Path(file)))
    try:
        (train_and_show if exchange.rank() == 0 else train)(config, Path(directory), resume=how == "resume")
    except RuntimeError as error:
        if "gloo" not in str(error) and not isinstance(error, DistNetworkError):
            raise
        raise LostProcessError("another process of the run is gone") from None


def _meet() -> None:
    """Find the other processes; the limit holds here only, since an iteration may well take longer."""
    seconds = float(os.environ.get(ARRIVAL_VARIABLE, ARRIVAL_SECONDS))
    try:
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=seconds)))
        exchange.join(store, rank, size)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise EsperError(f"the processes of the run did not come together: {reason}") from None


def work() -> None:
    """``main``, with its sentence left for ``esper train``, which shows one of those of all processes."""
    try:
        main()
        _leave(0)
    except LostProcessError:
        _leave(LOST_OTHERS)
    except EsperError as error:
        if SENTENCES_VARIABLE not in os.environ:
            raise
        (Path(os.environ[SENTENCES_VARIABLE]) / os.environ["RANK"]).write_text(str(error))
        _leave(USAGE_ERROR)
    except KeyboardInterrupt:
        _leave(INTERRUPTED)


def _leave(code: int) -> NoReturn:
    """End at once: to tear down threads of gloo, which may wait for processes that are gone, can abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_on_error(work)
