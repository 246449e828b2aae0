"""CPU time of the command ``esper sql`` on a run with a million decisions, process start included."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.timing import figure
from esper.karn.run import open_run
from esper.nissa.writer import RunWriter
from tests.karn import fake_run
from tests.rows import change

ROWS = 1_000_000
ROWS_PER_FLUSH = 1_000
SECONDS = 1.0
"""Largest allowed CPU seconds of ``esper sql`` on one thread, imports included."""
ITERATIONS = 5


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a run with a million decision rows that differ only in their epoch; return the run directory."""
    directory = tmp_path_factory.mktemp("long") / "run"
    row = fake_run.policy_decision_row(0)
    with RunWriter(directory) as writer:
        writer.emit(fake_run.run_row())
        for number in range(ROWS):
            change(row, epoch=number)
            writer.emit(row)
            if number % ROWS_PER_FLUSH == 0:
                writer.flush()
    return directory


def _seconds(run: Path, query: str) -> tuple[float, float]:
    """Return the CPU seconds and wall seconds of the whole command ``esper sql``, each the minimum over
    ``ITERATIONS`` executions.
    """
    costs = []
    for _ in range(ITERATIONS):
        began, before = time.perf_counter(), os.times()
        words = [sys.executable, "-c", "from esper.scripts.cli import main; main()", "sql", str(run), query]
        subprocess.run(words, stdout=subprocess.DEVNULL, check=True)
        after, wall = os.times(), time.perf_counter() - began
        user, system = (
            after.children_user - before.children_user,
            after.children_system - before.children_system,
        )
        costs.append((user + system, wall))
    return min(busy for busy, _ in costs), min(wall for _, wall in costs)


def bench_a_million_rows_are_counted_within_a_second(long_run: Path) -> None:
    busy, wall = _seconds(long_run, "select count(*) from decision")

    title = f"esper sql counts {ROWS:,} rows"
    figure(title, busy, "CPU seconds", at_most=SECONDS, note=f"{wall:.2f} s of wall")
    assert open_run(long_run).sql("select count(*) from decision").fetchall() == [(ROWS,)]


def bench_a_million_decisions_are_grouped_by_name_within_a_second(long_run: Path) -> None:
    busy, wall = _seconds(long_run, "select op, blueprint, count(*), avg(reward) from decisions group by all")

    title = f"esper sql groups {ROWS:,} decisions"
    figure(title, busy, "CPU seconds", at_most=SECONDS, note=f"{wall:.2f} s of wall")
