"""Fractions lie within 0 to 1 and scores within 0 to 100 in the telemetry rows of real runs."""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from esper.karn.run import read_rows
from esper.leyline.columns import COLUMNS, TABLE_OF
from esper.leyline.rows import TABLES, UNIT_RANGES, Row
from esper.run.arm import run_arm
from esper.run.run_config import RunConfig
from esper.tolaria.tasks import TASKS
from tests.nissa import record
from tests.tolaria.building import tiny_task


def numbers_within(value: object) -> Iterator[float]:
    inner = value.values() if isinstance(value, dict) else value
    if isinstance(inner, int | float):
        yield float(inner)
    elif inner is not None:
        for one in inner:  # type: ignore[attr-defined]  # a list, or the values of a map
            yield from numbers_within(one)


def outside(rows: Iterable[Row]) -> tuple[list[tuple[str, str, float]], Counter[str]]:
    """Return telemetry values outside the range of their unit, and for each unit the number of checked
    values."""
    found, seen = [], Counter[str]()
    for row in rows:
        for column in COLUMNS[TABLE_OF[type(row)]]:
            if column.unit in UNIT_RANGES:
                low, high = UNIT_RANGES[column.unit]
                for number in numbers_within(getattr(row, column.name)):
                    seen[column.unit] += 1
                    if not low <= number <= high:
                        found.append((TABLE_OF[type(row)], column.name, number))
    return found, seen


@pytest.mark.parametrize("name", ["converged", "exploding", "flipped", "good", "shaped"])
def test_fractions_and_scores_of_recorded_trainings_are_within_their_ranges(name: str) -> None:
    """The recorded trainings include two that were broken on purpose."""
    found, seen = outside(record.read(name))

    assert found == []
    assert seen["score" if name != "exploding" else "fraction"] > 20


@pytest.mark.parametrize("controller", ["heuristic", "random"])
def test_fractions_and_scores_in_all_tables_of_a_run_are_within_their_ranges(
    controller: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESPER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(TASKS, "tiny", tiny_task())
    config = RunConfig(controller=controller, steps=10).model_copy(update={"task": "tiny"})
    run = run_arm(config, controller, tmp_path / "run")
    found, seen = outside(row for table in TABLES for row in read_rows(run, TABLES[table]))

    assert found == []
    assert min(seen["fraction"], seen["score"]) > 20
