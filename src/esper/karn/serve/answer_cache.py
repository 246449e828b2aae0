"""Cache of values computed from runs, such as page sections; a value is valid until its run has new rows.

Each run is read by one thread at a time, and only a few runs stay open.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Final, TypeVar

from esper.files.row_files import TELEMETRY
from esper.files.writer_lock import signature
from esper.karn.run import DAMAGE, Run, open_run
from esper.karn.serve.folder import FoundRun, RunFolder
from esper.karn.stored_rows import error_text
from esper.leyline.errors import EsperError

T = TypeVar("T")
OPEN_RUNS: Final = 8
ANSWERS: Final = 500


class ReadingError(EsperError):
    """Error: the files of a run cannot be read; other runs are not affected."""


class AnswerCache:
    """Cache of values computed from the runs of a folder. The cache of values is thread-safe and computes one
    value at a time.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._open = lru_cache(OPEN_RUNS)(lambda path, signed: open_run(path))
        self._answers: OrderedDict[Hashable, tuple[str, object]] = OrderedDict()

    def ask(self, id: str, question: Hashable, answer: Callable[..., T], compared: str | None = None) -> T:
        """Return ``answer(run)``; the value comes from the cache if the run has no new rows.

        Args:
            id: Id of the run in the served folder.
            question: Hashable key of the value in the cache.
            answer: Function that computes the value from the run, and from the second run if there is one.
            compared: Id of a second run, which is left out if it cannot be read.

        Raises:
            ReadingError: The run cannot be read; the same error is raised again until the files of the run
                change.
        """
        found = self.folder.run(id)
        other = None if compared is None else self.folder.run(compared)
        version = found.version if other is None else f"{found.version} {other.version}"
        key = (id, question, compared)
        with self._lock:
            known_version, known = self._answers.get(key, (None, None))
            if known_version != version:
                known = self._work_out(found, other, answer)
                self._answers[key] = version, known
                self._answers.move_to_end(key)
                if len(self._answers) > ANSWERS:
                    self._answers.popitem(last=False)
        if isinstance(known, ReadingError):
            raise ReadingError(str(known))
        return known  # type: ignore[return-value]  # a question always has the same kind of answer

    def is_cached(self, id: str, question: Hashable) -> bool:
        """Return whether a value is cached, even if it was computed from fewer rows than the run has now."""
        return (id, question, None) in self._answers

    def _work_out(
        self, found: FoundRun, other: FoundRun | None, answer: Callable[..., T]
    ) -> T | ReadingError:
        if found.refusal is not None:
            return ReadingError(found.refusal)
        if other is not None and other.refusal is None:
            with suppress(*DAMAGE):
                return answer(self._opened(found.path), self._opened(other.path))
        try:
            return answer(self._opened(found.path))
        except DAMAGE as error:
            reason = error_text(error).replace(f"{found.path}/", "")
            return ReadingError(f"'{found.name}' cannot be read: {reason}")

    def _opened(self, path: Path) -> Run:
        """Return the run in a directory and keep it open; a directory that was removed and created again is a
        new run.
        """
        return self._open(path, signature(path / TELEMETRY))
