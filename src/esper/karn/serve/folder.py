"""Runs of the folder that the web server shows, identified by ids, and a cache of values computed from them.

HTTP requests name a run by its id; no path is built from request data. Symbolic links are not followed, so
files outside the served folder cannot be read. A cached value, such as a page section, is valid until its run
has new rows. Each run is read by one thread at a time, and only a few runs stay open.
"""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from esper.files.row_files import TELEMETRY, UNFINISHED
from esper.files.writer_lock import is_being_written, signature
from esper.karn.run import DAMAGE, Run, open_run
from esper.karn.runs import find_runs
from esper.karn.stored_rows import error_text, stamp_of
from esper.leyline.errors import EsperError

T = TypeVar("T")
SECONDS_BETWEEN_WALKS: Final = 1.0
WALK_SHARE: Final = 0.1
"""Largest fraction of wall-clock time that the server spends on searching a large folder for runs."""
OPEN_RUNS: Final = 8
ANSWERS: Final = 500


class FoundRun(NamedTuple):
    """Run in the folder that the web server shows, with a digest of the run's files as its version."""

    id: str
    name: str
    """Path of the run relative to the served folder."""
    path: Path
    version: str
    """Digest that changes when a file of the run changes, or when the process that writes the run starts or
    ends.
    """
    refusal: str | None = None
    """Reason why the run is not read; None if it is readable."""


class RunFolder:
    """Runs of a folder; the folder is searched about once a second, regardless of the number of requests. The
    class ``RunFolder`` is thread-safe.
    """

    def __init__(self, root: Path, clock: Callable[[], float] = time.monotonic) -> None:
        next(find_runs(root), None)  # find_runs raises an error if the folder does not exist.
        self.root = root.resolve()
        self._clock = clock
        self._lock = threading.Lock()
        self._found: Mapping[str, FoundRun] = {}
        self._due = -float("inf")

    def runs(self) -> Mapping[str, FoundRun]:
        """Return all runs of the served folder by id, sorted by name."""
        with self._lock:
            began = self._clock()
            if began >= self._due:
                self._found = {run.id: run for run in map(self._found_run, find_runs(self.root))}
                took = self._clock() - began
                self._due = began + max(SECONDS_BETWEEN_WALKS, took / WALK_SHARE)
            return self._found

    def run(self, id: str) -> FoundRun:
        """Return the run with the given id; raises ``UnknownRunError`` if there is none."""
        found = self.runs().get(id)
        if found is None:
            raise UnknownRunError(f"there is no run '{id[:40]}' in this folder; it may have been moved away")
        return found

    def _found_run(self, path: Path) -> FoundRun:
        name = path.relative_to(self.root).as_posix()
        id, name = _digest(name), self.root.name if name == "." else name
        try:
            version, link = _version_and_link(path / TELEMETRY)
        except OSError as error:
            return FoundRun(id, name, path, "", f"'{name}' cannot be looked at: {error.strerror}")
        refusal = f"'{name}' is not read: its telemetry holds a link, '{link}', and links are not followed"
        return FoundRun(id, name, path, version, refusal if link else None)


class UnknownRunError(EsperError):
    """Error: an id does not belong to a run of the served folder."""


def _version_and_link(telemetry: Path) -> tuple[str, str | None]:
    """Return a digest of a run's files, and the name of a symbolic link among the files, if any."""
    if telemetry.is_symlink():
        return "", telemetry.name
    files = sorted(_files(telemetry), key=lambda file: file.path)
    link = next((file.name for file in files if file.is_symlink()), None)
    written = is_being_written(telemetry)
    # The journal of an unfinished iteration grows with every epoch and is not read while a writer is alive.
    if written:
        unread = str(telemetry / UNFINISHED)
        files = [file for file in files if not file.path.startswith(unread)]
    return _digest([_stamp(file) for file in files], signature(telemetry), link or written), link


def _files(telemetry: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of a telemetry folder and of its subfolders."""
    for entry in os.scandir(telemetry):
        yield entry
        if entry.is_dir(follow_symlinks=False):
            yield from os.scandir(entry)


def _stamp(file: os.DirEntry[str]) -> tuple[str, tuple[int, ...]]:
    """Return path and stamp of a file; the stamp is empty if the file was removed after it was listed."""
    try:
        return file.path, stamp_of(file.stat(follow_symlinks=False))
    except FileNotFoundError:
        return file.path, ()


def _digest(*content: object) -> str:
    return hashlib.blake2b(repr(content).encode(), digest_size=6).hexdigest()


# --- cache ------------------------------------------------------------------------------------------


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
        self._answers: dict[Hashable, tuple[str, object]] = {}

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
                self._answers.pop(key, None)
                self._answers[key] = version, known
                if len(self._answers) > ANSWERS:
                    del self._answers[next(iter(self._answers))]
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
