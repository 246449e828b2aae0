"""Journal of a study: its identity, and one line per finished run."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from esper.files.atomic_write import write_durably
from esper.files.writer_lock import WriterLock
from esper.leyline.errors import UNREADABLE, EsperError
from esper.run.provenance import changed_settings
from esper.study.one_run import RunResult, StudyRun
from esper.study.study_config import StudyConfig
from esper.tamiyo.policy.checkpoint import POLICY_FILE, read_bytes, read_json

FOLDER: Final = "journal"
IDENTITY_FILE: Final = "study.json"
LINES_FILE: Final = "runs.jsonl"


class StudyJournal:
    """Finished runs of one study with their results."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LINES_FILE
        self.lines: dict[StudyRun, RunResult] = {}
        content = self._path.read_bytes() if self._path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]  # A killed process may leave an incomplete last line.
        for number, text in enumerate(whole.splitlines(), start=1):
            try:
                line = msgspec.json.decode(text, type=RunResult)
            except UNREADABLE:
                raise EsperError(
                    f"line {number} of '{self._path}' is damaged; remove it, and its run is done again"
                ) from None
            self.lines[line.run] = line
        if len(whole) != len(content):
            os.truncate(self._path, len(whole))

    def add(self, line: RunResult) -> None:
        """Append the result of a run and flush it to the disk."""
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.lines[line.run] = line


@contextmanager
def open_journal(out: Path, file: Path, config: StudyConfig) -> Iterator[StudyJournal]:
    """Open the journal of a study in ``out``, or create it.

    Args:
        out: Folder of the study's results.
        file: Study file, for error messages.
        config: Content of the study file.

    Raises:
        EsperError: The folder belongs to another study, another process uses it, or a line is damaged.
    """
    folder = out / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.callback(WriterLock(folder).release)
        _check_identity(folder / IDENTITY_FILE, out, file, config)
        yield StudyJournal(folder)


def _check_identity(path: Path, out: Path, file: Path, config: StudyConfig) -> None:
    """Refuse a journal made with other settings, data or policies, because results depend on them."""
    own: dict[str, Any] = config.model_dump(mode="json")
    own |= {f"data of {name}": config.task(name).digest() for name in config.tasks}
    own |= {
        f"policy {at}": hashlib.sha256(read_bytes(at / POLICY_FILE)).hexdigest() for at in config.policies()
    }
    if not path.exists():
        write_durably(path, json.dumps({"file": str(file), **own}, indent=1).encode())
        return
    kept = read_json(path)
    kept.pop("sha256", None)  # Journals of version 0.1 hold a digest of all settings.
    first_file = kept.pop("file", None)
    if different := changed_settings(own, kept):
        raise EsperError(
            f"'{out}' holds the study of '{first_file}', from which '{file}' differs in"
            f" {', '.join(different)}; go on with the file as it was, or choose another --out"
        )
