"""Results of a study: arrays for the statistics, and the result files with tables and charts."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Final

import duckdb
import numpy as np

from esper.files.atomic_write import SaveError, partial_of, save_errors, write_durably
from esper.karn.resampling import FloatArray
from esper.karn.study_page import ArmNumbers, StudyNumbers, render_study, study_tables
from esper.kasmina.compute import ComputeLedger
from esper.study.one_run import MarkResult
from esper.study.phases import TaskResults
from esper.study.study_config import StudyConfig

TABLE_FILE: Final = "table.md"
PAGE_FILE: Final = "study.html"
ROWS_FILE: Final = "answers.parquet"
RESULT_FILES: Final = (TABLE_FILE, PAGE_FILE, ROWS_FILE)
_COLUMNS: Final = """
    task VARCHAR, arm VARCHAR, training INTEGER, rng_seed BIGINT, mark DOUBLE, val_loss DOUBLE,
    test_loss DOUBLE, test_score DOUBLE, params BIGINT, seeds VARCHAR, flops MAP(VARCHAR, BIGINT),
    charged BIGINT, cut_short BOOLEAN, seconds DOUBLE
"""


def numbers_of(config: StudyConfig, task: str, found: TaskResults) -> StudyNumbers:
    """Return the results of one task as arrays; if instances of the task differ in budget, the mean budget is
    used.
    """
    ends = [answers[-1] for arm in found.arms.values() for training in arm for answers in training]
    dues = [answer.due for answer in ends if answer is not None]
    return StudyNumbers(
        task=f"{task} (held out)" if config.task(task).held_out else task,
        budget=round(fmean(dues)) if dues else config.task(task).budget or 0,
        marks=config.marks,
        rng_seeds=config.evaluation,
        arms=[_arm_numbers(name, found) for name in found.arms],
        control=config.control or next(iter(found.arms)),
        reference={name: _values_of("test_loss", own) for name, own in found.reference.items()},
    )


def _arm_numbers(name: str, found: TaskResults) -> ArmNumbers:
    answers = np.array(found.arms[name], dtype=object)
    values = partial(_values_of, answers=answers)
    grown = np.vectorize(lambda one: one is not None and bool(one.seeds), otypes=[bool])(answers)
    ends: list[MarkResult] = [answer for answer in answers[..., -1].flat if answer is not None]
    flops = {name: _mean([answer.flops[name] for answer in ends]) for name in ComputeLedger().flops()}
    return ArmNumbers(
        name=name,
        is_static=name in found.static,
        losses=values("test_loss"),
        scores=values("test_score")[..., -1],
        params=values("params").mean(axis=(0, 1)),
        seconds=values("seconds").mean(axis=(0, 1)),
        grown=grown.all(axis=(0, 1)),
        is_plan=name in found.plans,
        flops={"charged": _mean([answer.charged for answer in ends]), **flops},
        note=", ".join(_notes(name, found)),
    )


def _values_of(field: str, answers: object) -> FloatArray:
    """Return a field of results as an array of the same shape; NaN where it is unknown."""

    def value(one: MarkResult | None) -> float:
        found = None if one is None else getattr(one, field)
        return math.nan if found is None else float(found)

    return np.asarray(np.vectorize(value, otypes=[float])(np.array(answers, dtype=object)))


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def _notes(name: str, found: TaskResults) -> Iterator[str]:
    """Yield the choices made for an arm (factors on the learning rate, plan), and the number of its failed
    runs.
    """
    if found.factors[name]:
        yield f"rate × {' '.join(f'{factor:g}' for factor in found.factors[name])}"
    if name in found.plans:
        yield f"plan {found.plans[name]}"
    ends = [answers[-1] for training in found.arms[name] for answers in training]
    for count, what in (
        (sum(one is None for one in ends), "diverged" if found.factors[name] else "without a result"),
        (sum(one is not None and one.cut_short for one in ends), "ended early after rollbacks"),
    ):
        if count:
            yield f"{count} of {len(ends)} {what}"


def write_results(
    out: Path, name: str, config: StudyConfig, found: Mapping[str, TaskResults], show: Callable[[str], None]
) -> None:
    """Write the results of a study as Parquet, Markdown and HTML, and show the Markdown in any case.

    Args:
        out: Folder for the result files.
        name: Title of the study.
        config: Content of the study file.
        found: Results of the study, by task.
        show: Called with the Markdown.

    Raises:
        SaveError: A file cannot be written.
    """
    numbers = [numbers_of(config, task, own) for task, own in found.items()]
    tables = [table.markdown() for task in numbers for table in study_tables(task)]
    text = "\n\n".join([f"# {name}", *tables]) + "\n"
    try:
        write_durably(out / TABLE_FILE, text.encode())
        write_durably(out / PAGE_FILE, render_study(numbers, name).encode())
        _write_rows(out / ROWS_FILE, config, found)
    finally:
        show(text)


def _write_rows(path: Path, config: StudyConfig, found: Mapping[str, TaskResults]) -> None:
    """Write a Parquet file with one row per task, arm, training of a policy, rng seed and mark of the
    budget.
    """
    partial = partial_of(path)
    try:
        with duckdb.connect(":memory:") as database:
            answers = database.execute(f"CREATE TABLE answers ({_COLUMNS})").table("answers")
            rows = [
                [task, arm, training, rng_seed, mark, *_values(answer, answers.columns[5:])]
                for task, own in found.items()
                for arm, trainings in own.arms.items()
                for training, members in enumerate(trainings)
                for rng_seed, marks in zip(config.evaluation, members, strict=True)
                for mark, answer in zip(config.marks, marks, strict=True)
            ]
            values = ", ".join("?" * len(answers.columns))
            database.executemany(f"INSERT INTO answers VALUES ({values})", rows)
            answers.write_parquet(str(partial))
        with save_errors(path):
            write_durably(path, partial.read_bytes())
    except duckdb.Error as error:
        raise SaveError(f"'{path}' cannot be written: {str(error).splitlines()[0]}") from None
    finally:
        with suppress(OSError):
            partial.unlink()


def _values(answer: MarkResult | None, names: Sequence[str]) -> list[object]:
    return [None if answer is None else getattr(answer, name) for name in names]
