"""Speed-up of ``esper train`` by a second process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.timing import figure
from esper.files.cache_folder import CACHE_VARIABLE
from esper.karn.run import read_rows
from esper.leyline.rows import UpdateRow

ENVS, STEPS, ITERATIONS = 16, 15, 3
"""Episodes have 15 steps, because with five steps one process waits for the other and the speed-up is only
1.75.
"""
RUN = f"train --task digits --envs {ENVS} --steps {STEPS} --iterations {ITERATIONS} --hidden-dim 64"
EVALUATION = f"--evaluate-every {ITERATIONS} --evaluate-episodes 1 --checkpoint-every {ITERATIONS}"
REPEATS = 2
LIMIT = 1.8


def _seconds(processes: int, directory: Path, cache: Path) -> list[float]:
    """Return the wall times of the iterations without the first (warm-up) and the last (evaluation)."""
    command = [sys.executable, "-c", "from esper.scripts.cli import main; main()", *RUN.split()]
    command += [*EVALUATION.split(), "--processes", str(processes), "--out", str(directory)]
    environment = {**os.environ, CACHE_VARIABLE: str(cache), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    iterations = [row.seconds for row in read_rows(directory, UpdateRow)]
    assert len(iterations) == ITERATIONS
    return iterations[1:-1]


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two processes need two cores")
def bench_two_processes_do_at_least_1_8_times_the_work_of_one(tmp_path: Path) -> None:
    """Compare environment-steps per wall-clock second; needs a machine with two idle cores.

    A run before the measurement fills the cache of twins, and the run itself times its iterations, so that
    start-up does not count. The time of an iteration is that of its fastest repetition.
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
