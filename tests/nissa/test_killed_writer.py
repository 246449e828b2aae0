"""Writers killed with SIGKILL, at chosen moments and at any: every flushed row is there once, none twice."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from esper.karn.query import read_rows
from esper.leyline.events import DecisionRow
from tests.nissa.endless_writer import BATCH, MOMENTS

ROOT = Path(__file__).parents[2]


def start(kind: str, run: Path, *moment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "nissa" / "endless_writer.py"), kind, str(run), *moment],
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        stdout=subprocess.PIPE,
        text=True,
    )


def last_said(process: subprocess.Popen[str]) -> int:
    """What the process had flushed when it died."""
    assert process.stdout is not None
    said = process.stdout.read().split("\n")[:-1]  # what follows the last newline is torn
    assert process.wait() == -signal.SIGKILL
    return int(said[-1]) if said else 0


def kill_after(process: subprocess.Popen[str], seconds: float) -> int:
    """Kill a process that long after it said something for the first time; what it had flushed."""
    assert process.stdout is not None
    first = int(process.stdout.readline())
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    return max(first, last_said(process))


def assert_rows_are_there_once(run: Path, flushed: int) -> None:
    found = [row.epoch for row in read_rows(run, DecisionRow)]
    assert found == list(range(len(found)))
    assert flushed <= len(found) <= flushed + BATCH


@pytest.mark.parametrize("kind", ["write", "resume"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_writer_killed_while_it_converts_loses_no_row(tmp_path, kind, moment):
    with start(kind, tmp_path / "run", moment) as process:
        flushed = last_said(process)

    assert flushed > 0
    assert_rows_are_there_once(tmp_path / "run", flushed)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed_while_it_converts_is_resumed_and_converts_what_was_left(tmp_path, moment):
    run = tmp_path / "run"
    with start("resume", run, moment) as process:
        last_said(process)
    with start("resume", run) as process:
        assert process.stdout is not None
        while int(process.stdout.readline()) < 3000:
            pass
        process.send_signal(signal.SIGKILL)
        last_said(process)

    files = sorted(path.name for path in (run / "telemetry").glob("rows-*"))
    assert files[:2] in (["rows-00000-00000", f"rows-00001-{last}"] for last in ("00005", "00010"))
    assert not {"rows-00001.jsonl", "rows-00005.jsonl"} & set(files)
    found = [row.epoch for row in read_rows(run, DecisionRow)]
    assert found == list(range(len(found)))
    assert len(found) >= 3000


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_loses_no_flushed_row(tmp_path):
    stream = random.Random(1)
    for number in range(12):
        run = tmp_path / str(number)
        with start("write", run) as process:
            flushed = kill_after(process, stream.uniform(0, 0.2))
        assert_rows_are_there_once(run, flushed)


@pytest.mark.slow
def test_a_run_killed_and_resumed_at_any_moment_loses_no_flushed_row(tmp_path):
    stream = random.Random(2)
    run = tmp_path / "run"
    for _ in range(12):
        with start("resume", run) as process:
            flushed = kill_after(process, stream.uniform(0, 0.2))
        assert_rows_are_there_once(run, flushed)
