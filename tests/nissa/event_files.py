"""Reader of TensorBoard event files, and the scalars that an export of a row must contain."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event

from esper.leyline.rows import EpisodeRow, EpochRow, Row, RunRow


class Point(NamedTuple):
    tag: str
    step: int
    wall_time: float
    value: float


def events_in(directory: Path) -> list[Event]:
    """Return all events of the only event file in a directory, read and checksummed by TensorBoard."""
    (file,) = directory.iterdir()
    return [Event.FromString(data) for data in RawEventFileLoader(str(file)).Load()]


def points_in(directory: Path) -> list[Point]:
    """Return all scalars in the TensorBoard event file of a directory."""
    return sorted(
        Point(value.tag, event.step, event.wall_time, value.simple_value)
        for event in events_in(directory)
        for value in event.summary.value
        if value.HasField("simple_value")
    )


def points_expected(run: RunRow, rows: list[Any]) -> list[Point]:
    """Return the scalars that an export of rows must contain, computed without the exporter."""
    return sorted(point for row in rows for point in _points(run, row))


def _points(run: RunRow, row: Row) -> Iterator[Point]:
    fields = msgspec.to_builtins(row)
    wall_time = datetime.fromisoformat(run.started).timestamp() + fields.pop("t")
    table, step, episode = "update", fields.pop("iteration", None), ""
    if isinstance(row, EpochRow):
        table, step = "epoch", fields.pop("epoch")
        episode = f"/env{fields.pop('env')}-episode{fields.pop('episode')}"
        fields.pop("attempt")
    elif isinstance(row, EpisodeRow):
        table, step, attempt = "episode", fields.pop("episode"), fields.pop("attempt")
        episode = f"/env{fields.pop('env')}" + (f"-attempt{attempt}" if attempt else "")
    for column, content in fields.items():
        for entry, value in _entries(run, column, content).items():
            if isinstance(value, int | float):
                tag = f"{table}/{column}/{entry}".rstrip("/") + episode
                yield Point(tag, step, wall_time, float(np.float32(value)))


def _entries(run: RunRow, column: str, content: Any) -> dict[str, Any]:
    if isinstance(content, list):
        return dict(zip(run.heads if "head" in column else run.ops, content, strict=True))
    return content if isinstance(content, dict) else {"": content}
