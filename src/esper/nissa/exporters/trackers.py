"""Points in Trackio and in Weights & Biases, by what their interfaces have in common: init, log, finish.

Both stamp what they get with the time of the export, so each table's ``t`` is handed over as a number.
They are loaded only here and only when asked for.
"""

import os
import sqlite3
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from esper.leyline.columns import TABLE_OF
from esper.leyline.events import RunRow
from esper.nissa.exporters import points as export
from esper.nissa.exporters.points import ExportError, Points, create_export_folder, provenance


@dataclass(slots=True)
class TrackerExporter:
    """Hands points to a run that a tracker has begun."""

    log: Callable[[dict[str, float], int], object]
    finish: Callable[[], object]
    view: str
    """The command that shows what was exported."""

    def take(self, points: Points) -> None:
        position = {f"{points.table}/{points.axis}": points.step, f"{points.table}/t": points.t}
        self.log({**position, **points.values}, points.step)

    def flush(self) -> None:
        """Nothing to do: trackers send by themselves."""

    def close(self) -> None:
        self.finish()


def trackio_exporter(run: RunRow, out: Path | None, project: str) -> TrackerExporter:
    """A run in a Trackio project, kept in ``out`` or else where Trackio keeps its projects.

    Projects hold many runs, so the place need not be new, but the run's name must be.
    """
    if out is not None:
        os.environ["TRACKIO_DIR"] = str(out)  # read once, when the package is loaded
    trackio = _package("trackio")
    if out is not None:
        create_export_folder(out, alone=False)
    hardware = {"auto_log_gpu": False, "auto_log_cpu": False}  # this machine is not the run's
    try:
        if run.name in _known_names(trackio, project):
            raise ExportError(
                f"the Trackio project '{project}' already holds a run '{run.name}';"
                " delete it there to export anew, or choose another --project"
            )
        trackio.init(project=project, name=run.name, config=_configuration(run), embed=False, **hardware)
    except (ValueError, OSError, sqlite3.Error) as error:
        raise ExportError(f"Trackio did not begin a run: {error}") from error
    place = "" if out is None else f"TRACKIO_DIR={out} "
    view, finish = f"{place}trackio show --project {project}", _without_warnings(trackio.finish)
    return TrackerExporter(lambda values, step: trackio.log(values, step=step), finish, view)


def wandb_exporter(run: RunRow, out: Path, project: str) -> TrackerExporter:
    """A run for Weights & Biases in a new directory; offline unless WANDB_MODE says otherwise.

    Its own step must not go back, so it is left alone and every table's axis is a metric.
    """
    wandb = _package("wandb")
    create_export_folder(out)
    try:
        begun = wandb.init(
            project=project,
            name=run.name,
            config=_configuration(run),
            dir=str(out),
            mode=os.environ.get("WANDB_MODE", "offline"),
            settings=wandb.Settings(console="off", x_disable_stats=True),  # this machine is not the run's
        )
    except wandb.Error as error:
        raise ExportError(f"Weights & Biases did not begin a run: {error}") from error
    for row_type in export.exported_types(run):
        table = TABLE_OF[row_type]
        begun.define_metric(f"{table}/*", step_metric=f"{table}/{export.STEP_COLUMNS[row_type]}")
    view = begun.url or f"wandb sync {Path(begun.dir).parent}"
    return TrackerExporter(lambda values, step: begun.log(values), begun.finish, view)


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ExportError(f"the package '{name}' is not installed; get it by: pip install {name}") from None


def _known_names(trackio: Any, project: str) -> set[str]:
    try:
        return {known.name for known in trackio.Api().runs(project)}
    except ValueError:  # there is no such project yet
        return set()


def _without_warnings(finish: Callable[[], object]) -> Callable[[], None]:
    """``finish``, refusing what was warned of from now on: Trackio warns where it loses what it was told."""
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
