"""What of a study is done: its identity, and one line per run, appended when the run is over."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from esper.files.atomic_write import write_durably
from esper.files.writer_lock import WriterLock
from esper.leyline.errors import UNREADABLE, EsperError
from esper.study.config import StudyConfig
from esper.study.running import Line, Run
from esper.tamiyo.policy.checkpoint import POLICY_FILE, read_bytes, read_json

FOLDER: Final = "journal"
IDENTITY_FILE: Final = "study.json"
LINES_FILE: Final = "runs.jsonl"


class Journal:
    """The runs of one study that are done, by what they are."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LINES_FILE
        self.lines: dict[Run, Line] = {}
        content = self._path.read_bytes() if self._path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]  # a killed process may have left half a line
        for number, text in enumerate(whole.splitlines(), start=1):
            try:
                line = msgspec.json.decode(text, type=Line)
            except UNREADABLE:
                raise EsperError(
                    f"line {number} of '{self._path}' is damaged; remove it, and its run is done again"
                ) from None
            self.lines[line.run] = line
        if len(whole) != len(content):
            os.truncate(self._path, len(whole))

    def add(self, line: Line) -> None:
        """Append a line and see it to the disk."""
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.lines[line.run] = line


@contextmanager
def open_journal(out: Path, file: Path, config: StudyConfig) -> Iterator[Journal]:
    """The journal of this study in ``out``, new or as it was left; that of another study is refused."""
    folder = out / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    lock = WriterLock(folder)
    try:
        _check_identity(folder / IDENTITY_FILE, out, file, config)
        yield Journal(folder)
    finally:
        lock.release()


def _check_identity(path: Path, out: Path, file: Path, config: StudyConfig) -> None:
    """Whatever numbers depend on must be as it was when the first of them was made."""
    own: dict[str, Any] = config.model_dump(mode="json")
    own |= {f"data of {name}": config.task(name).digest() for name in config.tasks}
    own |= {
        f"policy {at}": hashlib.sha256(read_bytes(at / POLICY_FILE)).hexdigest() for at in config.policies()
    }
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()
    if not path.exists():
        write_durably(path, json.dumps({"file": str(file), "sha256": digest, **own}, indent=1).encode())
        return
    kept = read_json(path)
    if kept.get("sha256") != digest:
        names = [name for name in {**own, **kept} if own.get(name) != kept.get(name)]
        different = ", ".join(name for name in names if name not in ("file", "sha256"))
        raise EsperError(
            f"'{out}' holds the study of '{kept.get('file')}', from which '{file}' differs in {different};"
            " go on with the file as it was, or choose another --out"
        )
