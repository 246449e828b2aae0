"""What a question to a long run costs: a million decisions, counted by ``esper sql`` from a standing start."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from esper.karn.run import open_run
from esper.nissa.writer import RunWriter
from tests.karn import fake_run

ROWS = 1_000_000
ROWS_PER_FLUSH = 1_000
SECONDS_TO_COUNT = 1.0
SECONDS_BY_NAME = 2.0
ROUNDS = 5


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One row, written a million times."""
    directory = tmp_path_factory.mktemp("long") / "run"
    row = fake_run.policy_decision_row(0)
    began = time.process_time()
    with RunWriter(directory) as writer:
        writer.emit(fake_run.run_row())
        for number in range(ROWS):
            row.epoch = number
            writer.emit(row)
            if number % ROWS_PER_FLUSH == 0:
                writer.flush()
    cost = (time.process_time() - began) / ROWS * 1e6
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()) / 1e6
    print(f"\nwriting {ROWS:,} rows: {cost:.1f} µs a row with conversion to Parquet, {size:.0f} MB on disk")
    return directory


def _ask(run: Path, query: str) -> tuple[float, float]:
    """Wall and processor seconds of the whole command, the least of some."""
    code = "from esper.scripts.cli import main; main()"
    costs = []
    for _ in range(ROUNDS):
        began, before = time.perf_counter(), os.times()
        subprocess.run(
            [sys.executable, "-c", code, "sql", str(run), query], stdout=subprocess.DEVNULL, check=True
        )
        after = os.times()
        busy = after.children_user + after.children_system - before.children_user - before.children_system
        costs.append((time.perf_counter() - began, busy))
    return min(wall for wall, _ in costs), min(busy for _, busy in costs)


def bench_a_million_rows_are_counted_within_a_second(long_run: Path) -> None:
    wall, busy = _ask(long_run, "select count(*) from decision")

    load = os.getloadavg()[0]
    print(
        f"\ncounting {ROWS:,} rows: {wall:.2f} s, of which {busy:.2f} s of processor (limit {SECONDS_TO_COUNT}); load {load:.1f}"
    )
    assert wall <= SECONDS_TO_COUNT
    assert open_run(long_run).sql("select count(*) from decision").fetchall() == [(ROWS,)]


def bench_names_are_looked_up_for_a_million_rows(long_run: Path) -> None:
    wall, busy = _ask(long_run, "select op, blueprint, count(*), avg(reward) from decisions group by all")

    load = os.getloadavg()[0]
    print(f"\ngrouping {ROWS:,} decisions by name: {wall:.2f} s, {busy:.2f} s of processor; load {load:.1f}")
    assert wall <= SECONDS_BY_NAME
