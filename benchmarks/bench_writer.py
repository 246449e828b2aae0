"""CPU time of writing telemetry rows in the training process: encoding, flushing and conversion to
Parquet.
"""

import time
from pathlib import Path

import pytest

from benchmarks.rollout import NUM_ENVS, Rollout, Stopwatch
from benchmarks.timing import figure
from esper.leyline.rows import Row
from esper.nissa.writer import RunWriter
from tests.karn import fake_run

MICROSECONDS_PER_ROW = 10.0
SHARE_OF_A_STEP = 0.01
EPISODES = 40
ITERATIONS = 5
DECISIONS = 100_000
"""Number of decision rows that one measurement writes, enough for five conversions to Parquet."""
DECISIONS_PER_FLUSH = 800


def _rows() -> list[Row]:
    return [row for episode in range(EPISODES) for row in fake_run.episode(episode)]


def _cost(directory: Path) -> float:
    rows = _rows()
    with RunWriter(directory) as writer:
        began = time.process_time()
        for row in rows:
            writer.emit(row)
            if type(row).__name__ == "EpochRow":
                writer.flush()
        return (time.process_time() - began) / len(rows) * 1e6


def bench_a_row_costs_at_most_ten_microseconds(tmp_path: Path) -> None:
    cost = min(_cost(tmp_path / str(number)) for number in range(ITERATIONS))

    figure("a row written, flushes included", cost, "µs", at_most=MICROSECONDS_PER_ROW)


def _cost_of_decisions(directory: Path) -> float:
    row = fake_run.policy_decision_row(0)
    with RunWriter(directory) as writer:
        began = time.process_time()
        for number in range(DECISIONS):
            writer.emit(row)
            if number % DECISIONS_PER_FLUSH == 0:
                writer.flush()
        cost = (time.process_time() - began) / DECISIONS * 1e6
    assert len(list((directory / "telemetry").glob("*/decision.parquet"))) == 5
    return cost


def bench_a_decision_costs_at_most_ten_microseconds_with_its_conversion_to_parquet(tmp_path: Path) -> None:
    cost = min(_cost_of_decisions(tmp_path / str(number)) for number in range(ITERATIONS))

    figure("a decision written, Parquet included", cost, "µs", at_most=MICROSECONDS_PER_ROW)


def bench_the_writer_takes_at_most_one_percent_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measure an iteration of 16 hosts on digits under an untrained policy; rows are written to the journal
    and to the file of the iteration.
    """
    rollout, watch = Rollout.prepare(tmp_path / "run", monkeypatch), Stopwatch()
    total = rollout.run(monkeypatch, watch)
    share = watch.seconds["writer"] / total

    note = f"{1000 * total / rollout.horizon:.0f} ms a step"
    title = f"writer in an iteration of {NUM_ENVS} hosts on digits"
    figure(title, 100 * share, "%", at_most=100 * SHARE_OF_A_STEP, note=note)
