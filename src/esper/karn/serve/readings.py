"""What was asked about runs and answered: kept until the run has new rows.

Opened runs are used by one thread at a time, and only a few stay open.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Final, TypeVar

import duckdb

from esper.karn.line_copies import sentence_of
from esper.karn.run import Run, open_run
from esper.karn.serve.folder import FoundRun, RunFolder
from esper.leyline.errors import EsperError
from esper.leyline.lock import LOCK_FILE
from esper.leyline.run_files import TELEMETRY

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
Place = tuple[Path, int, int]
"""A run's directory, and what tells its telemetry from another's that was there before."""
OPEN_RUNS: Final = 8
ANSWERS: Final = 1000
LOG: Final = logging.getLogger(__name__)


class ReadingError(EsperError):
    """A run that cannot be read; the others can."""


class Readings:
    """Answers about the runs of a folder. Any thread may ask; one answer is worked out at a time."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._open: OrderedDict[Place, Run] = OrderedDict()
        self._answers: OrderedDict[tuple[str, Hashable], tuple[str, object]] = OrderedDict()

    def ask(self, id: str, question: Hashable, answer: Callable[[Run], T]) -> T:
        """``answer`` of the run, from memory if it was asked the same ``question`` since its last row.

        A run that cannot be read gives the same error each time.
        """
        found = self.folder.run(id)
        return self._remembered((id, question), found.version, lambda: self._work_out(found, answer))

    def ask_beside(
        self, id: str, other: str, question: Hashable, answer: Callable[[Run, Run | None], T]
    ) -> T:
        """The same of a run that is shown beside another one; that is None if it cannot be read."""
        found, beside = self.folder.run(id), self.folder.run(other)

        def work_out() -> T | ReadingError:
            if beside.refusal is None:
                known = self._work_out(found, lambda run: answer(run, self._opened(beside.path)))
                if not isinstance(known, ReadingError):
                    return known
            return self._work_out(found, lambda run: answer(run, None))

        return self._remembered((id, (question, other)), f"{found.version} {beside.version}", work_out)

    def _remembered(
        self, key: tuple[str, Hashable], version: str, work_out: Callable[[], T | ReadingError]
    ) -> T:
        with self._lock:
            known_version, known = self._answers.get(key, (None, None))
            if known_version != version:
                known = work_out()
                _keep(self._answers, key, (version, known), ANSWERS)
        if isinstance(known, ReadingError):
            raise ReadingError(str(known))
        return known  # type: ignore[return-value]  # a question always has the same kind of answer

    def ask_both(self, left: str, right: str, answer: Callable[[Run, Run], T]) -> T:
        """``answer`` of two runs."""
        one, other = self.folder.run(left), self.folder.run(right)
        with self._lock:
            known = self._work_out(one, lambda run: self._work_out(other, lambda beside: answer(run, beside)))
        if isinstance(known, ReadingError):
            raise known
        return known

    def _work_out(self, found: FoundRun, answer: Callable[[Run], T]) -> T | ReadingError:
        if found.refusal is not None:
            return ReadingError(found.refusal)
        try:
            return answer(self._opened(found.path))
        except (EsperError, duckdb.Error, OSError) as error:
            reason = sentence_of(error).replace(f"{found.path}/", "")
            return ReadingError(f"'{found.name}' cannot be read: {reason}")
        except Exception as error:
            # What is in a file may break any code that reads it: the trace is for us, the page goes on.
            LOG.exception("'%s' broke the page", found.name)
            return ReadingError(f"'{found.name}' cannot be shown: {type(error).__name__}: {error}")

    def _opened(self, path: Path) -> Run:
        """The run in a directory; another one if that was removed and made anew."""
        lock = path / TELEMETRY / LOCK_FILE  # which no writer ever changes
        status = (lock if lock.exists() else path / TELEMETRY).stat()
        place = (path, status.st_ino, status.st_ctime_ns)
        run = self._open.get(place) or open_run(path)
        _keep(self._open, place, run, OPEN_RUNS)
        return run


def _keep(memory: OrderedDict[K, T], key: K, value: T, most: int) -> None:
    """Remember the latest few."""
    memory[key] = value
    memory.move_to_end(key)
    while len(memory) > most:
        memory.popitem(last=False)
