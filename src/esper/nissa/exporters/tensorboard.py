"""Export to TensorBoard: numbers of rows as scalars, the configuration as text, in an event file.

The package ``tensorboard`` is imported only when an export is requested. Records are written without its
``EventFileWriter``, which names the file by the time of the export and writes on a thread: a flush here ends
when all points are on the disk, and an error of the disk reaches the caller.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from esper.leyline import RunRow
from esper.nissa.exporters.points import Points, create_export_folder, import_package, provenance, wall_time


class TensorBoardExporter:
    """Exporter to a TensorBoard event file in an empty directory; TensorBoard would merge other event files
    there into the same run.

    TensorBoard scalars are float32; numbers beyond the range of float32 are stored as infinite.
    """

    def __init__(self, run: RunRow, out: Path) -> None:
        import_package("tensorboard")
        self._make_event = import_module("tensorboard.compat.proto.event_pb2").Event
        records = import_module("tensorboard.summary.writer.record_writer")
        create_export_folder(out)
        self._run = run
        self.view = f"tensorboard --logdir {out}"
        began = wall_time(run, 0.0)
        file = (out / f"events.out.tfevents.{began:.0f}.esper").open("xb")
        self._records = records.RecordWriter(file)
        self.flush, self.close = self._records.flush, self._records.close
        self._write(wall_time=began, file_version="brain.Event:2")
        texts = {"run/configuration": run.config, "run/provenance": provenance(run)}
        values = [_text(tag, table(facts)) for tag, facts in texts.items()]
        self._write(wall_time=began, step=0, summary={"value": values})

    def take(self, points: Points) -> None:
        values = [{"tag": tag, "simple_value": number} for tag, number in points.values.items()]
        self._write(wall_time=wall_time(self._run, points.t), step=points.step, summary={"value": values})

    def _write(self, **fields: Any) -> None:
        self._records.write(self._make_event(**fields).SerializeToString())


def _text(tag: str, markdown: str) -> dict[str, Any]:
    """Return the fields of a summary value for TensorBoard's text plugin."""
    return {
        "tag": tag,
        "tensor": {"dtype": "DT_STRING", "string_val": [markdown.encode()]},
        "metadata": {"plugin_data": {"plugin_name": "text"}},
    }


def table(facts: Mapping[str, object]) -> str:
    """Return names and values as a Markdown table; a nested map has one table row per entry."""
    rows = [f"| {_cell(name)} | {_cell(fact)} |" for name, fact in _flat(facts)]
    return "\n".join(["| name | value |", "|---|---|", *rows])


def _flat(facts: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, fact in facts.items():
        if isinstance(fact, dict):
            yield from _flat(fact, f"{prefix}{name}.")
        else:
            yield prefix + name, fact


def _cell(fact: object) -> str:
    """Return the text of a Markdown table cell; None is a dash, and characters that would end the cell are
    replaced.
    """
    return "–" if fact is None else str(fact).replace("|", "\\|").replace("\n", " ")
