"""Hands a training to torchrun, and says in one sentence how that ended."""

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

from esper.leyline.errors import EsperError
from esper.simic.training_config import TrainingConfig

SENTENCES_VARIABLE = "ESPER_SENTENCES"
"""Folder in which each of several processes leaves why it ended."""
LOST_OTHERS = 3
"""Exit code of a process that ended because another one had."""


def launch(config: TrainingConfig, directory: Path, processes: int, *, resume: bool) -> None:
    """Hand the run to torchrun, which starts this command once per process (``worker.py``)."""
    with tempfile.TemporaryDirectory() as folder, _lent_to_torchrun():
        file, sentences = Path(folder) / "config.json", Path(folder) / "sentences"
        file.write_text(config.model_dump_json())
        sentences.mkdir()
        os.environ[SENTENCES_VARIABLE] = str(sentences)
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
    """Environment, log and signals for torchrun, which reports failures at length; put back afterwards."""
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
    """What became of the process that ended without a word."""
    rank, failure = min(error.failures.items(), key=lambda item: item[1].exitcode == LOST_OTHERS)
    if failure.exitcode < 0:
        return f"process {rank} of {processes} was ended by {failure.signal_name()}"
    return f"process {rank} of {processes} ended with code {failure.exitcode}; see its message above"
