"""Reads on where it stopped: the new rows of a run that is being written, in the order they were emitted.

Only whole lines are taken, part after part, whether a part is still JSON lines or Parquet by now. Nothing
is locked and nothing is written, so that a writer never notices.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import duckdb
import msgspec

from esper.leyline.columns import TABLE_OF
from esper.leyline.errors import UNREADABLE, EsperError
from esper.leyline.events import (
    AlertRow,
    DecisionRow,
    EnvRow,
    EpisodeRow,
    EpochRow,
    Row,
    RunRow,
    SeedRow,
    TransitionRow,
    UpdateRow,
)
from esper.leyline.run_files import TELEMETRY, list_parts

FOLLOWED: Final[tuple[type[Row], ...]] = (
    RunRow,
    DecisionRow,
    TransitionRow,
    EpochRow,
    SeedRow,
    EpisodeRow,
    UpdateRow,
    AlertRow,
)
"""The rows that a view takes, in the order of those that were emitted in the same moment."""
LIVED: Final = frozenset({DecisionRow, TransitionRow, EpochRow, SeedRow})
"""Of these only an episode that is shown needs any."""
SETTLE_SECONDS: Final = 0.02
"""Longer than a writer needs to write out all its tables."""
MAX_LOOKS: Final = 10
_TIES: Final = {kind: place for place, kind in enumerate(FOLLOWED)}


class CutError(Exception):
    """What was read is no longer there: the run was resumed from a checkpoint before it."""


class Mark(NamedTuple):
    """Where reading a part as lines has come to, and the line that ends there.

    Lines hold the time to a millionth of a second, so that no other one looks the same.
    """

    end: int
    line: bytes

    def is_in(self, path: Path) -> bool:
        """Whether the line is still there; raises ``FileNotFoundError`` if the part has become Parquet."""
        with path.open("rb") as file:
            file.seek(self.end - len(self.line))
            return file.read(len(self.line)) == self.line


class TableTail:
    """The new rows of one table."""

    def __init__(self, folder: Path, row_type: type[Row]) -> None:
        self._folder = folder
        self._row_type = row_type
        self._decoder = msgspec.json.Decoder(row_type)
        self._part = 0
        self._taken = 0
        """Rows of the present part that were read."""
        self._marks: dict[int, Mark] = {}
        """Of the parts that were read as lines. Only these can be cut: Parquet is older than a checkpoint."""

    def read(self, episodes_from: int = 0) -> list[Row]:
        """What came since the last call; of what was lived, that of the given iteration and later ones.

        Raises ``CutError`` if what came before that is not all there.
        """
        since = episodes_from if self._row_type in LIVED else 0
        rows: list[Row] = []
        while (parts := list_parts(self._folder)) or self._marks:
            try:
                self._check_marks(parts)
                if self._part not in parts:
                    break  # the last part is closed, and the next one has no row yet
                rows += self._read_part(parts[self._part], since)
            except FileNotFoundError:
                continue  # it has become Parquet
            if self._part + 1 not in parts and parts[self._part].suffix == ".jsonl":
                break
            self._part, self._taken = self._part + 1, 0
        return rows

    def _check_marks(self, parts: Mapping[int, Path]) -> None:
        self._marks = {
            number: mark
            for number, mark in self._marks.items()
            if number not in parts or parts[number].suffix == ".jsonl"
        }
        for number, mark in self._marks.items():
            if number not in parts or not mark.is_in(parts[number]):
                raise CutError

    def _read_part(self, path: Path, since: int) -> list[Row]:
        if path.suffix == ".parquet":
            return self._decoded(path, _parquet_lines(path, self._taken, since))
        lines = self._new_lines(path)
        self._taken += len(lines)
        return [row for row in self._decoded(path, lines) if iteration_within(row) >= since]

    def _new_lines(self, path: Path) -> Sequence[bytes]:
        start = self._marks[self._part].end if self._part in self._marks else 0
        with path.open("rb") as file:
            file.seek(start)
            content = file.read()
        # What follows the last newline is being written just now, or torn.
        lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
        if lines:
            self._marks[self._part] = Mark(start + sum(map(len, lines)), lines[-1])
        return lines

    def _decoded(self, path: Path, lines: Iterable[bytes | str]) -> list[Row]:
        try:
            return [self._decoder.decode(line) for line in lines]
        except UNREADABLE as error:
            raise EsperError(f"{path} holds a line that is not a row of this table: {error}") from None


def _parquet_lines(path: Path, taken: int, since: int) -> list[str]:
    """The rows after the first ``taken`` ones, as JSON, of episodes from iteration ``since`` on."""
    lived = f"iteration >= {since}" if since else "true"
    query = (
        f"SELECT to_json(part) FROM (SELECT * EXCLUDE file_row_number"
        f" FROM read_parquet(?, file_row_number = true) WHERE file_row_number >= {taken} AND {lived}) part"
    )
    with duckdb.connect(":memory:") as connection:
        return [text for (text,) in connection.execute(query, [str(path)]).fetchall()]


class Tail:
    """The new rows of a whole run."""

    def __init__(self, directory: Path) -> None:
        self._telemetry = directory / TELEMETRY
        self._tables = self._from_the_start()
        self.is_anew = False
        """Whether the last reading began from the start, since the run had cut off what was read before."""

    def _from_the_start(self) -> list[TableTail]:
        return [TableTail(self._telemetry / TABLE_OF[kind], kind) for kind in FOLLOWED]

    def read(self, episodes_from: int = 0) -> list[Row]:
        """What came since the last call, as it was emitted; tables that are being written are waited for.

        Decisions, epochs, seeds and transitions of episodes before iteration ``episodes_from`` are passed over. Where
        a resumed run has cut off what was read, this is what ``read_latest`` of a new tail would give.
        """
        rows: list[Row] = []
        self.is_anew = False
        for _ in range(MAX_LOOKS):
            try:
                found = [row for table in self._tables for row in table.read(episodes_from)]
            except CutError:
                self.is_anew, self._tables, rows = True, self._from_the_start(), []
                episodes_from = self._last_iteration()
                continue
            rows += found
            if not found:
                break
            time.sleep(SETTLE_SECONDS)
        return sorted(rows, key=lambda row: (row.t, _TIES[type(row)]))

    def read_latest(self) -> list[Row]:
        """The same, of what was lived the last iteration of a training only."""
        return self.read(self._last_iteration())

    def _last_iteration(self) -> int:
        updates = TableTail(self._telemetry / TABLE_OF[UpdateRow], UpdateRow).read()
        return max((row.iteration for row in updates if isinstance(row, UpdateRow)), default=0)

    def age(self) -> float:
        """Seconds since something was written."""
        changes = [path.stat().st_mtime for path in self._telemetry.glob("*/part-*")]
        return max(time.time() - max(changes), 0.0) if changes else 0.0


def iteration_within(row: Row) -> float:
    """The iteration that a row belongs to, 0 for the run's own; infinite for what belongs to none."""
    match row:
        case UpdateRow():
            return row.iteration
        case AlertRow(iteration=int(number)):
            return number
        case EnvRow() | AlertRow(episode=int()):
            return row.iteration or 0
        case RunRow():
            return 0
    return math.inf
