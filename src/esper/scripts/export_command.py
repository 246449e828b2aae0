"""``esper export RUN``: write metrics of a run for TensorBoard, Trackio or Weights & Biases, once or until
the run ends.

The export only reads the run directory; the training process is not involved.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, model_validator

from esper.karn.run import Run, open_run
from esper.karn.stored_rows import State
from esper.leyline import Row, RunRow, printable
from esper.nissa.exporters.points import ExportError, exported_types, points_of
from esper.nissa.exporters.tensorboard import TensorBoardExporter
from esper.nissa.exporters.trackers import TrackerExporter, trackio_exporter, wandb_exporter
from esper.run.run_config import Settings
from esper.scripts.flags import parse_words

POLL_SECONDS: Final = 2.0
ENDINGS: Final = {
    "running": "the run is not over, and --follow would wait for its end",
    "finished": "the run has finished",
    "stopped": "the run has stopped before its end",
}


class ExportConfig(Settings):
    """Write the metrics of a run for TensorBoard, Trackio or Weights & Biases."""

    to: Literal["tensorboard", "trackio", "wandb"] = "tensorboard"
    """Format of the export: the tool that reads it."""
    out: Path | None = None
    """Output directory; RUN/export/TOOL unless given, and trackio's own directory for trackio."""
    project: str = Field("esper", min_length=1)
    """Name of the project in trackio or wandb."""
    follow: bool = False
    """Export new rows until the run has ended; Ctrl-C ends the export earlier."""

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> ExportConfig:
        if "project" in self.model_fields_set and self.to == "tensorboard":
            raise ValueError("project is read by trackio and wandb only; add --to trackio or --to wandb")
        return self


def export_command(args: Sequence[str]) -> None:
    needed = "a run's directory as its first word, such as runs/mine"
    words, config = parse_words(ExportConfig, "esper export RUN", args, needed=needed)
    run = open_run(words[0])
    exported: Counter[str] = Counter()
    ending = ""
    try:
        while config.follow and run.state == "running" and not run.rows(RunRow):
            time.sleep(POLL_SECONDS)  # The run row, which the exporter needs, is not written yet.
        with closing(make_exporter(run, config)) as exporter:
            print(printable(f"exporting {run.path}; see it with: {exporter.view}"), flush=True)
            for state, rows in looks(run, follow=config.follow):
                for points in (points_of(row, run.row) for row in rows):
                    exporter.take(points)
                    exported[points.table] += 1
                exporter.flush()
                ending = ENDINGS[state]
    except KeyboardInterrupt:  # Ctrl-C is the usual way to end ``--follow``.
        ending = "interrupted"
    except OSError as error:
        raise ExportError(f"the export cannot be written: {error.strerror}") from error
    counts = ", ".join(f"{number} of {table}" for table, number in exported.items()) or "none yet"
    print(f"rows exported: {counts}; {ending}")


def make_exporter(run: Run, config: ExportConfig) -> TensorBoardExporter | TrackerExporter:
    """Return the exporter for the chosen format, with its output opened."""
    out = config.out or run.path / "export" / config.to
    match config.to:
        case "tensorboard":
            return TensorBoardExporter(run.row, out)
        case "trackio":
            return trackio_exporter(run.row, config.out, config.project)
        case "wandb":
            return wandb_exporter(run.row, out, config.project)


def looks(run: Run, *, follow: bool) -> Iterator[tuple[State, list[Row]]]:
    """Yield the state of a run with its new rows: once, or with ``follow`` repeatedly until the run has
    ended."""
    known: dict[type[Row], list[Row]] = {}
    while True:
        # The state of the run is read before its rows, because a run that has ended has written all its rows.
        state = run.state
        yield state, [row for row_type in exported_types(run.row) for row in new_rows(run, row_type, known)]
        if state != "running" or not follow:
            return
        time.sleep(POLL_SECONDS)


def new_rows(run: Run, row_type: type[Row], known: dict[type[Row], list[Row]]) -> list[Row]:
    """Return the rows of one type that were written since the last call; ``known`` keeps all earlier rows."""
    before, rows = known.get(row_type, []), sorted(run.rows(row_type), key=lambda row: row.t)
    if rows[: len(before)] != before:
        raise ExportError(
            "the run was resumed from an earlier point, so that part of what was exported is no longer"
            " true; export it again to a new directory"
        )
    known[row_type] = rows
    return rows[len(before) :]
