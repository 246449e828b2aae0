"""The directory of a training by ``grow``: its rows, one file of them per epoch, and its checkpoint.

Both are those of one epoch: a training that was killed goes on behind its checkpoint, and the rows that
were written since are removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Any, Final

import torch

from esper.files.row_files import RowMark
from esper.growth.saving import write
from esper.karn.run import read_rows
from esper.leyline.errors import EsperError, RunDirectoryError
from esper.leyline.protocols import EventSink
from esper.leyline.rows import RunRow
from esper.nissa.writer import RunWriter
from esper.telemetry import Telemetry

CHECKPOINT: Final = "checkpoint.pt"


class RunDirectory(AbstractContextManager["RunDirectory"]):
    """Where one training is written, and what it goes on from."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        found = path / CHECKPOINT
        if resume and not found.is_file():
            raise RunDirectoryError(
                f"'{path}' holds no {CHECKPOINT} to resume from; remove what is there and leave resume out"
            )
        if not resume and path.exists():
            raise RunDirectoryError(
                f"'{path}' exists and is not overwritten; pass resume=True or another out="
            )
        self.checkpoint: dict[str, Any] | None = torch.load(found, weights_only=True) if resume else None
        self._opened = ExitStack()

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def begin(self, run: RunRow) -> EventSink:
        """Write the run's row, or take up the run as it was left; returns where its rows go."""
        mark = None
        if self.checkpoint is not None:  # refused before a writer removes what was written since
            _check_same(self.path, read_rows(self.path, RunRow)[0].config, run.config)
            mark = RowMark(*self.checkpoint["rows"])
        self._writer = self._opened.enter_context(closing(RunWriter(self.path, resume_from=mark)))
        sink = Telemetry(run, self._writer)
        if self.checkpoint is None:
            with self.rows_of(0):
                sink.emit(run)
        else:
            sink.replay(self.path)
        return sink

    def rows_of(self, epoch: int, *, is_last: bool = False) -> AbstractContextManager[None]:
        """Rows emitted within are those of an epoch, all of them or none."""
        return self._writer.iteration(epoch, is_last=is_last)

    def save(self, state: Mapping[str, Any]) -> None:
        """The checkpoint of the last epoch that was written."""
        with self._writer.checkpoint() as mark:
            write({**state, "rows": tuple(mark)}, self.path / CHECKPOINT)


def _check_same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with other settings: neither the training nor its rows would be one."""
    for name in dict.fromkeys((*before, *now)):
        if before.get(name) != now.get(name):
            raise EsperError(
                f"'{path}' was begun with {name}={before.get(name)!r}, and is to go on with"
                f" {now.get(name)!r}; pass what it was begun with, or begin anew in another out="
            )
