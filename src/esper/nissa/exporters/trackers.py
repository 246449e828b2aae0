"""Export to Trackio and Weights & Biases by the interface that they share: functions ``init``, ``log`` and
``finish``.

Trackio and Weights & Biases stamp points with the time of the export, so the time ``t`` of each row is logged
as a value. The package of Trackio or Weights & Biases is imported only when an export to it is requested.
"""

import os
import sqlite3
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper.leyline import RunRow
from esper.leyline.columns import TABLE_OF
from esper.nissa.exporters import points as export
from esper.nissa.exporters.points import ExportError, Points, create_export_folder, import_package, provenance


@dataclass(slots=True)
class TrackerExporter:
    """Exporter that logs points to a run of Trackio or Weights & Biases."""

    log: Callable[[dict[str, float], int], object]
    close: Callable[[], object]
    view: str
    """Shell command or web address that shows the exported run."""

    def take(self, points: Points) -> None:
        position = {f"{points.table}/{points.axis}": points.step, f"{points.table}/t": points.t}
        self.log({**position, **points.values}, points.step)

    def flush(self) -> None:
        """Do nothing; Trackio and Weights & Biases flush by themselves."""


def trackio_exporter(run: RunRow, out: Path | None, project: str) -> TrackerExporter:
    """Start a run in a Trackio project, stored in ``out`` or in Trackio's default folder.

    A Trackio project has many runs, so its folder may exist, but the name of the run must be new.
    """
    if out is not None:
        # Trackio reads TRACKIO_DIR only once, when its package is imported.
        os.environ["TRACKIO_DIR"] = str(out)
    trackio = import_package("trackio")
    if out is not None:
        create_export_folder(out, alone=False)
    # Trackio's hardware statistics are off, because the exported run may have used another machine.
    hardware = {"auto_log_gpu": False, "auto_log_cpu": False}
    try:
        if run.name in _known_names(trackio, project):
            raise ExportError(
                f"the Trackio project '{project}' already holds a run '{run.name}';"
                " delete it there to export again, or choose another --project"
            )
        trackio.init(project=project, name=run.name, config=_configuration(run), embed=False, **hardware)
    except (ValueError, OSError, sqlite3.Error) as error:
        raise ExportError(f"Trackio did not begin a run: {error}") from error
    place = "" if out is None else f"TRACKIO_DIR={out} "
    view, finish = f"{place}trackio show --project {project}", _without_warnings(trackio.finish)
    return TrackerExporter(lambda values, step: trackio.log(values, step=step), finish, view)


def wandb_exporter(run: RunRow, out: Path, project: str) -> TrackerExporter:
    """Start a run for Weights & Biases in a new directory, offline unless WANDB_MODE is set.

    Steps of wandb must not decrease, so no wandb step is set; the step axis of every table is logged as a
    metric.
    """
    wandb = import_package("wandb")
    create_export_folder(out)
    try:
        begun = wandb.init(
            project=project,
            name=run.name,
            config=_configuration(run),
            dir=str(out),
            mode=os.environ.get("WANDB_MODE", "offline"),
            # Machine statistics of wandb are off, because the exported run may have used another machine.
            settings=wandb.Settings(console="off", x_disable_stats=True),
        )
    except wandb.Error as error:
        raise ExportError(f"Weights & Biases did not begin a run: {error}") from error
    for row_type in export.exported_types(run):
        table = TABLE_OF[row_type]
        begun.define_metric(f"{table}/*", step_metric=f"{table}/{export.STEP_COLUMNS[row_type]}")
    view = begun.url or f"wandb sync {Path(begun.dir).parent}"
    return TrackerExporter(lambda values, step: begun.log(values), begun.finish, view)


def _known_names(trackio: Any, project: str) -> set[str]:
    try:
        return {known.name for known in trackio.Api().runs(project)}
    except ValueError:  # Trackio raises ValueError if the project does not exist yet.
        return set()


def _without_warnings(finish: Callable[[], object]) -> Callable[[], None]:
    """Wrap ``finish`` so that it raises an error if Trackio has issued a warning since the wrapping, because
    Trackio reports lost points only by warnings.
    """
    stack = ExitStack()
    warned = stack.enter_context(warnings.catch_warnings(record=True))
    warnings.simplefilter("always", UserWarning)

    def finish_and_refuse() -> None:
        with stack:
            finish()
        if warned:
            raise ExportError(f"Trackio did not keep everything: {warned[0].message}")

    return finish_and_refuse


def _configuration(run: RunRow) -> dict[str, Any]:
    return {**run.config, "provenance": provenance(run)}
