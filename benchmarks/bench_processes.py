"""Speed-up of ``esper train`` by a second process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.timing import figure
from esper.karn.run import read_rows
from esper.leyline.rows import UpdateRow

ENVS, STEPS, ITERATIONS = 16, 15, 3
"""Episodes have 15 steps: in episodes of five steps, one process waits so long for the other that the
speed-up is at most 1.75.
"""
RUN = f"train --task digits --envs {ENVS} --steps {STEPS} --iterations {ITERATIONS} --hidden-dim 64"
EVALUATION = f"--evaluate-every {ITERATIONS} --evaluate-episodes 1 --checkpoint-every {ITERATIONS}"
REPEATS = 2
LIMIT = 1.8


def _seconds(processes: int, directory: Path, cache: Path) -> list[float]:
    """Return the wall seconds of each training iteration except the first (warm-up) and the last
    (evaluation).
    """
    command = [sys.executable, "-c", "from esper.scripts.cli import main; main()", *RUN.split()]
    command += [*EVALUATION.split(), "--processes", str(processes), "--out", str(directory)]
    environment = {**os.environ, "ESPER_CACHE": str(cache), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    iterations = [row.seconds for row in read_rows(directory, UpdateRow)]
    assert len(iterations) == ITERATIONS
    return iterations[1:-1]


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two processes need two cores")
def bench_two_processes_do_at_least_1_8_times_the_work_of_one(tmp_path: Path) -> None:
    """Compare the environment steps per wall-clock second of one and of two processes; needs a machine with
    two idle cores.

    A first run, which is not measured, fills the cache of twin scores (scores of hosts without growth). Times
    of iterations come from the update rows that a run writes, so the start-up of processes is excluded. The
    time of an iteration is the minimum over repeated runs.
    """
    cache = tmp_path / "cache"
    _seconds(2, tmp_path / "first", cache)
    runs = {
        (processes, number): _seconds(processes, tmp_path / f"{processes}-{number}", cache)
        for number in range(REPEATS)
        for processes in (1, 2)
    }
    rates = {}
    for processes in (1, 2):
        fastest = map(min, *(runs[processes, number] for number in range(REPEATS)))
        rates[processes] = ENVS * STEPS * (ITERATIONS - 2) / sum(fastest)

    gain = rates[2] / rates[1]
    note = f"{rates[2]:.1f} and {rates[1]:.1f} environment-steps a second"
    figure("2 processes", gain, "× 1 process", at_least=LIMIT, note=note)
