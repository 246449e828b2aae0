"""Start of a policy training in several processes by torchrun."""

import logging
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from esper.files.atomic_write import write_durably
from esper.leyline import EsperError
from esper.scripts.parent_process import PARENT_VARIABLE
from esper.simic.config import TrainingConfig

SENTENCES_VARIABLE = "ESPER_SENTENCES"
"""Environment variable with the folder in which each process writes its error message."""
LOST_OTHERS = 3
"""Exit code of a process that ended because another process of the training was lost."""


def launch(config: TrainingConfig, directory: Path, processes: int, *, resume: bool) -> None:
    """Start a policy training in several processes by torchrun (see ``worker.py``) and wait until it ends.

    Args:
        config: Configuration of the policy training.
        directory: Run directory of the training.
        processes: Number of processes to start.
        resume: Whether to continue from the latest checkpoint in ``directory``.

    Raises:
        EsperError: A process of the training failed.
        KeyboardInterrupt: A signal such as SIGINT stopped the processes.
    """
    with tempfile.TemporaryDirectory() as folder, _lent_to_torchrun():
        file, sentences = Path(folder) / "config.json", Path(folder) / "sentences"
        write_durably(file, config.model_dump_json().encode())
        sentences.mkdir()
        os.environ |= {SENTENCES_VARIABLE: str(sentences), PARENT_VARIABLE: str(os.getpid())}
        words = ["--standalone", f"--nproc-per-node={processes}", "-m", "esper.scripts.train", "ppo"]
        words += ["--resume", str(directory)] if resume else ["--config", str(file), "--out", str(directory)]
        try:
            torchrun.run(torchrun.parse_args(words))
        except ChildFailedError as error:
            said = [path.read_text() for path in sorted(sentences.iterdir())]
            ended = f"{_end_of(error, processes)}; go on with esper train --resume {directory}"
            raise EsperError(said[0] if said else ended) from None
        except SignalException:
            raise KeyboardInterrupt from None


@contextmanager
def _lent_to_torchrun() -> Iterator[None]:
    """Silence the log of torchrun inside the context; restore environment, log level and signal handlers on
    exit."""
    environment, log = dict(os.environ), logging.root.manager.disable
    taken = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    handlers = {number: signal.getsignal(number) for number in taken}
    os.environ.update(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="FATAL")
    logging.disable()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        logging.disable(log)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _end_of(error: ChildFailedError, processes: int) -> str:
    """Return a sentence about the process that failed without writing an error message."""
    rank, failure = min(error.failures.items(), key=lambda item: item[1].exitcode == LOST_OTHERS)
    if failure.exitcode < 0:
        return f"process {rank} of {processes} was ended by {failure.signal_name()}"
    return f"process {rank} of {processes} ended with code {failure.exitcode}; see its message above"
