"""Time, peak memory and file size of ``esper report`` for a policy training with a million telemetry rows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks.timing import figure
from esper.leyline.rows import EpochRow, Row
from esper.nissa.writer import RunWriter
from tests.karn import fake_run

ITERATIONS, ENVS = 200, 32
CONFIGURATIONS = 14
"""Number of counterfactual rows (scores with some seeds switched off) per epoch."""
SECONDS = 20.0
MEGABYTES = 500.0
KILOBYTES = 500.0

_COMMAND = """
import json, sys, time
from pathlib import Path
began = time.perf_counter()
from esper.scripts.cli import main
main(sys.argv[1:])
peak = next(line.split()[1] for line in Path("/proc/self/status").open() if line.startswith("VmHWM:"))
print(json.dumps({"seconds": time.perf_counter() - began, "cpu": time.process_time(),
                  "megabytes": int(peak) / 1024}))
"""
"""Program that runs an ``esper`` command and prints its time and its peak resident memory, read as VmHWM from
/proc.

The counter ``ru_maxrss`` of ``getrusage`` is not used: it survives ``exec`` and would be at least the peak of
the benchmark process.
"""


def _episode(number: int, env: int) -> Iterator[Row]:
    for row in fake_run.episode(number):
        yield msgspec.structs.replace(row, env=env, iteration=number + 1)
        if isinstance(row, EpochRow):
            for index in range(CONFIGURATIONS):
                on = (bool(index & 1), bool(index & 2), bool(index & 4))
                scored = fake_run.counterfactual_row(row.epoch, on)
                place = {"env": env, "episode": number, "iteration": number + 1}
                yield msgspec.structs.replace(scored, **place, score=40.0 + index)


def _write(directory: Path) -> int:
    written = 0
    with RunWriter(directory) as writer:
        writer.emit(
            msgspec.structs.replace(fake_run.run_row("long", "ppo", iterations=ITERATIONS), envs=ENVS)
        )
        for number in range(ITERATIONS):
            for env in range(ENVS):
                for row in _episode(number, env):
                    writer.emit(row)
                    written += 1
            writer.emit(fake_run.update_row(number + 1))
            writer.flush()
    return written


def bench_a_report_of_a_million_rows(tmp_path: Path) -> None:
    rows = _write(tmp_path / "run")
    assert rows > 1_000_000
    out = tmp_path / "report.html"
    words = [sys.executable, "-c", _COMMAND, "report", str(tmp_path / "run"), "--out", str(out)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    used = json.loads(done.stdout.splitlines()[-1])
    size = out.stat().st_size / 1000
    title = f"report of {rows:,} rows"
    figure(title, used["seconds"], "s", at_most=SECONDS, note=f"{used['cpu']:.1f} CPU seconds")
    figure(title, used["megabytes"], "MB resident", at_most=MEGABYTES)
    figure(title, size, "kB", at_most=KILOBYTES)
