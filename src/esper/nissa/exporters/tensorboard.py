"""Export to TensorBoard: points as scalars, the configuration as text."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from esper.leyline.rows import RunRow
from esper.nissa.exporters.event_file import EventFile, scalar, text
from esper.nissa.exporters.points import Points, create_export_folder, provenance, wall_time


class TensorBoardExporter(EventFile):
    """Event file in a new directory; TensorBoard would merge other files there into the same run."""

    def __init__(self, run: RunRow, out: Path) -> None:
        create_export_folder(out)
        self._run = run
        self.view = f"tensorboard --logdir {out}"
        began = wall_time(run, 0.0)
        super().__init__(out / f"events.out.tfevents.{began:.0f}.esper", began)
        texts = {"run/configuration": run.config, "run/provenance": provenance(run)}
        self.add(began, 0, [text(tag, table(facts)) for tag, facts in texts.items()])

    def take(self, points: Points) -> None:
        values = [scalar(tag, number) for tag, number in points.values.items()]
        self.add(wall_time(self._run, points.t), points.step, values)


def table(facts: Mapping[str, object]) -> str:
    """Return names and values as a Markdown table; nested maps have one row per entry."""
    rows = [f"| {_cell(name)} | {_cell(fact)} |" for name, fact in _flat(facts)]
    return "\n".join(["| name | value |", "|---|---|", *rows])


def _flat(facts: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, fact in facts.items():
        if isinstance(fact, dict):
            yield from _flat(fact, f"{prefix}{name}.")
        else:
            yield prefix + name, fact


def _cell(fact: object) -> str:
    """Return a table cell; None is a dash, and characters that would end the cell are replaced."""
    return "–" if fact is None else str(fact).replace("|", "\\|").replace("\n", " ")
