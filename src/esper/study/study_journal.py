"""Journal of a study: a file with its settings, and a file with one line per finished run.

A line contains the result of the run and the SHA-256 of its text, so that any damage is recognised.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from esper.files.append import open_to_append, write_all
from esper.files.atomic_write import (
    SaveError,
    flush_to_disk,
    make_folder,
    remove_partials,
    save_errors,
    write_durably,
)
from esper.files.row_files import check_outside_runs
from esper.files.writer_lock import WriterLock
from esper.leyline import UNREADABLE, EsperError, notify
from esper.run.provenance import changed_settings
from esper.study.one_run import RunResult, StudyRun
from esper.study.study_config import StudyConfig
from esper.study.study_results import RESULT_FILES
from esper.tamiyo.policy.checkpoint import POLICY_FILE, read_bytes, read_json

FOLDER: Final = "journal"
IDENTITY_FILE: Final = "study.json"
LINES_FILE: Final = "runs.jsonl"


class JournalLine(msgspec.Struct, frozen=True):
    """Line of the journal; ``result`` is the text of a ``RunResult``."""

    sha256: str
    result: msgspec.Raw


def encoded_line(result: RunResult) -> bytes:
    """Return the line of a finished run."""
    text = msgspec.json.encode(result)
    return msgspec.json.encode(JournalLine(hashlib.sha256(text).hexdigest(), msgspec.Raw(text))) + b"\n"


def decoded_line(line: bytes) -> RunResult:
    """Return the result in a line of the journal.

    Raises:
        msgspec.DecodeError: The line is damaged.
    """
    if b'"sha256"' not in line:  # Lines of version 0.1 contain the result alone.
        return msgspec.json.decode(line, type=RunResult)
    found = msgspec.json.decode(line, type=JournalLine)
    text = bytes(found.result)
    if hashlib.sha256(text).hexdigest() != found.sha256:
        raise msgspec.DecodeError
    return msgspec.json.decode(text, type=RunResult)


class StudyJournal:
    """Finished runs of one study with their results.

    A journal that cannot be written does not end the study; results then wait in memory (ADR 0044).
    """

    def __init__(self, folder: Path, lock: WriterLock) -> None:
        self._lock = lock
        self._path = folder / LINES_FILE
        self._waiting = bytearray()
        """Lines that are not in the file yet."""
        self.lines: dict[StudyRun, RunResult] = {}
        content = self._path.read_bytes() if self._path.exists() else b""
        # A killed process may leave an incomplete last line in the journal.
        whole = content[: content.rfind(b"\n") + 1]
        for number, text in enumerate(whole.splitlines(), start=1):
            try:
                line = decoded_line(text)
            except UNREADABLE:
                raise EsperError(
                    f"line {number} of '{self._path}' is damaged; remove it, and its run is done again"
                ) from None
            self.lines[line.run] = line
        if len(whole) != len(content):
            os.truncate(self._path, len(whole))
        self._file = open_to_append(self._path)
        flush_to_disk(folder)

    def add(self, line: RunResult) -> None:
        """Append the result of a finished run to the journal, or print why it cannot be written yet."""
        self.lines[line.run] = line
        self._waiting += encoded_line(line)
        try:
            self.write()
        except SaveError as error:
            notify(f"{error}; the study continues, and the result waits in memory")

    def write(self) -> None:
        """Write all results to the disk.

        Raises:
            SaveError: The journal cannot be written.
        """
        with save_errors(self._path):
            self._lock.check()
            write_all(self._file, self._waiting)
            os.fsync(self._file)

    def close(self) -> None:
        """Close the file of the journal."""
        os.close(self._file)


@contextmanager
def open_journal(out: Path, file: Path, config: StudyConfig) -> Iterator[StudyJournal]:
    """Open the journal of a study in ``out``, or create it.

    Args:
        out: Folder of the study's results.
        file: Study file, which error messages name.
        config: Content of the study file.

    Raises:
        EsperError: The folder belongs to another study, has files of the names of the results, cannot be
            written or is used by another process, or a line of the journal is damaged.
    """
    folder = out / FOLDER
    if not folder.exists():
        check_outside_runs(out)
    with ExitStack() as stack:
        with save_errors(out):
            make_folder(folder)
            lock = WriterLock(folder)
            stack.callback(lock.release)
            _check_identity(folder / IDENTITY_FILE, out, file, config)
            for place in (out, folder):
                remove_partials(place)
            journal = StudyJournal(folder, lock)
        stack.callback(journal.close)
        yield journal


def _check_identity(path: Path, out: Path, file: Path, config: StudyConfig) -> None:
    """Raise an error if the journal was made with other settings, data or policies, because results depend on
    them.
    """
    own: dict[str, Any] = config.model_dump(mode="json")
    own |= {f"data of {name}": config.task(name).digest() for name in config.tasks}
    own |= {
        f"policy {at}": hashlib.sha256(read_bytes(at / POLICY_FILE)).hexdigest() for at in config.policies()
    }
    if not path.exists():
        if held := [name for name in RESULT_FILES if os.path.lexists(out / name)]:
            raise EsperError(
                f"'{out}' already holds {', '.join(held)} of another program; choose another --out"
            )
        write_durably(path, json.dumps({"file": str(file), **own}, indent=1).encode())
        return
    kept = read_json(path)
    kept.pop("sha256", None)  # Journals of version 0.1 contain a digest of all settings, which is ignored.
    first_file = kept.pop("file", None)
    if different := changed_settings(own, kept):
        raise EsperError(
            f"'{out}' holds the study of '{first_file}', from which '{file}' differs in"
            f" {', '.join(different)}; go on with the file as it was, or choose another --out"
        )
