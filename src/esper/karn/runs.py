"""All runs below a folder, one line each: what was run, how far it came and how well it does."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.table import Table
from rich.text import Text

from esper.karn import notation
from esper.karn.questions.progress import Progress, done_text, progress
from esper.karn.run import Run, State, open_run
from esper.leyline.errors import EsperError
from esper.leyline.events import EpisodeRow, RunRow
from esper.leyline.run_files import TELEMETRY


@dataclass(frozen=True, slots=True)
class Overview:
    """One run in a list; None is unknown."""

    path: str
    state: State | Literal["damaged"]
    problem: str | None = None
    """Why it is damaged."""
    task: str | None = None
    controller: str | None = None
    rng_seed: int | None = None
    started: str | None = None
    progress: Progress | None = None
    best_score: float | None = None
    last_score: float | None = None
    params: float | None = None


def find_runs(folder: Path) -> Iterator[Path]:
    """The run directories in ``folder`` and below it, in order of their names; hidden folders hold none."""
    if not folder.is_dir():
        raise EsperError(f"there is no folder '{folder}'; name the one that holds your runs")
    for parent, folders, _ in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if TELEMETRY in folders:
            folders.clear()
            yield Path(parent)


def overview(path: Path) -> Overview:
    """One run; what cannot be read is part of the answer."""
    try:
        return _overview(open_run(path))
    except (EsperError, OSError) as error:
        return Overview(str(path), "damaged", problem=str(error))


def _overview(run: Run) -> Overview:
    if not run.rows(RunRow):
        return Overview(str(run.path), run.state)
    row, found = run.row, progress(run)
    table, key = ("update", "iteration") if found.unit == "iteration" else ("episode", "t")
    if table == "episode" and not run.rows(EpisodeRow):
        table, key = "epoch", "t"  # the first episode is under way
    ((best, last, params),) = run.sql(
        f"SELECT max(val_score), arg_max(val_score, {key}), arg_max(params, {key}) FROM {table}"
    ).fetchall()
    return Overview(
        path=str(run.path),
        state=found.state,
        task=row.task,
        controller=row.controller,
        rng_seed=row.rng_seed,
        started=row.started,
        progress=found,
        best_score=best,
        last_score=last,
        params=params,
    )


def table_of(overviews: Sequence[Overview]) -> Table:
    """The list as people read it."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in (
        "run",
        "task",
        "controller",
        "rng seed",
        "best",
        "last",
        "params",
        "done",
        "state",
        "started",
    ):
        is_number = heading in ("rng seed", "best", "last", "params", "done")
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=True)
    for run in overviews:
        table.add_row(*(Text(cell or notation.UNKNOWN) for cell in _cells(run)))
    return table


def _cells(run: Overview) -> Iterator[str | None]:
    yield run.path
    yield run.task
    yield run.controller
    yield None if run.rng_seed is None else str(run.rng_seed)
    yield notation.points(run.best_score)
    yield notation.points(run.last_score)
    yield notation.count(run.params)
    yield None if run.progress is None else done_text(run.progress)
    yield run.state
    yield None if run.started is None else run.started[:16].replace("T", " ")


def as_json(run: Overview) -> dict[str, Any]:
    """The same for machines."""
    found = run.progress
    return {
        "path": run.path,
        "state": run.state,
        "problem": run.problem,
        "task": run.task,
        "controller": run.controller,
        "rng_seed": run.rng_seed,
        "started": run.started,
        "unit": None if found is None else found.unit,
        "done": None if found is None else found.done,
        "planned": None if found is None else found.total,
        "seconds_left": None if found is None else found.seconds_left,
        "steps_per_second": None if found is None else found.steps_per_second,
        "best_score": run.best_score,
        "last_score": run.last_score,
        "params": run.params,
    }
