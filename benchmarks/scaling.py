"""Time and network traffic of a training iteration with one, two and four processes.

``python -m benchmarks.scaling`` prints the tables of docs/scaling.md in two to five minutes. The benchmark
runs in a separate network namespace (``unshare``, Linux), so that all bytes on the loopback device belong to
the measured training. The measured traffic includes packet headers and excludes the start-up of processes.
"""

import fcntl
import os
import pickle
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from esper.files.row_files import TELEMETRY, lines_path
from esper.karn.run import read_rows
from esper.leyline.rows import UpdateRow
from esper.nissa.writer import RunWriter
from esper.run.factories import describe_run
from esper.run.policy_training import task_of
from esper.run.row_sink import RowSink
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.config import TrainingConfig
from esper.simic.training.trainer import SHARD_ENVS, Trainer
from esper.tolaria.env import MorphEnv

ENVS, STEPS, ITERATIONS = 16, 10, 4
RUN = f"train --task digits_impaired --envs {ENVS} --steps {STEPS} --iterations {ITERATIONS}"
EVALUATION = f"--evaluate-every {ITERATIONS} --evaluate-episodes 1 --checkpoint-every {ITERATIONS}"
INSIDE = "--inside"


class Moment(NamedTuple):
    """Network bytes and CPU seconds counted up to the end of a training iteration."""

    wire_bytes: int
    cpu_seconds: float


def raise_loopback() -> None:
    """Bring up the loopback device, which is down in a new network namespace."""
    with socket.socket() as any_socket:
        up = struct.pack("16sH14s", b"lo", 0x1 | 0x40, b"")  # Set the flags IFF_UP and IFF_RUNNING.
        fcntl.ioctl(any_socket, 0x8914, up)  # The ioctl request 0x8914 is SIOCSIFFLAGS (set interface flags).


def wire_bytes() -> int:
    """Return the number of bytes received on the loopback device so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith("lo:"))


def cpu_seconds(root: int) -> float:
    """Return the CPU seconds of a process and its living descendants."""
    parents, ticks = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # The process of ``folder`` ended after /proc was listed.
            continue
        parents[int(folder.name)], ticks[int(folder.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(ticks.get(pid, 0) for pid in family) / os.sysconf("SC_CLK_TCK")


def measure(processes: int, out: Path, cache: Path) -> str:
    """Return the row of the scaling table for a number of processes: means over all iterations except the
    first (warm-up) and the last (evaluation).
    """
    command = [sys.executable, "-c", "from esper.scripts.cli import main; main()", *RUN.split()]
    command += [*EVALUATION.split(), "--processes", str(processes), "--out", str(out)]
    environment = {**os.environ, "ESPER_CACHE": str(cache), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    run = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    moments = []
    for number in range(1, ITERATIONS):
        while not lines_path(out / TELEMETRY, number).exists():
            if run.poll() is not None:
                raise SystemExit(f"a run of {processes} processes ended in iteration {number}")
            time.sleep(0.01)
        moments.append(Moment(wire_bytes(), cpu_seconds(run.pid)))
    run.wait()
    counted = ITERATIONS - 2
    rows = read_rows(out, UpdateRow)[1:-1]
    seconds = {
        name: sum(row.phase_ms[name] for row in rows) / 1000 / counted for name in ("rollout", "update")
    }
    cpu = (moments[-1].cpu_seconds - moments[0].cpu_seconds) / counted
    wire = (moments[-1].wire_bytes - moments[0].wire_bytes) / counted
    return (
        f"| {processes} | {seconds['rollout']:.2f} | {seconds['update']:.2f} | {cpu:.2f}"
        f" | {1000 * cpu / (ENVS * STEPS):.1f} | {wire / 1000:,.0f} |"
    )


def cpu_ms(call: Callable[[], object], times: int = 5) -> float:
    """Return the minimum CPU milliseconds over several calls of a function."""
    spent = []
    for _ in range(times):
        began = time.process_time()
        call()
        spent.append(1000 * (time.process_time() - began))
    return min(spent)


def parts(folder: Path) -> dict[str, str]:
    """Measure the work that is not divided among processes (messages, policy update, writing rows), and
    return its cost per environment step.
    """
    torch.set_num_threads(1)
    config = TrainingConfig(task="digits_impaired", envs=SHARD_ENVS, steps=STEPS, iterations=1)
    trainer = Trainer(task_of(config), config)
    shard = trainer._rollout(trainer._training[0])
    message = pickle.dumps(shard)
    rollout = TamiyoRolloutBuffer.join([shard.buffer] * (ENVS // SHARD_ENVS))
    # The PPO update is measured only once, because a second update on the same rollout would stop early.
    updating = cpu_ms(lambda: trainer.agent.update(rollout, 0.0), times=1)
    env = MorphEnv(trainer.task, rng_seed=0)
    env.reset(0)
    run = describe_run(config, "ppo", "run", env)
    update = trainer.run_iteration().update
    with RunWriter(folder / "rows", detail=config.detail) as writer:
        telemetry = RowSink(run, writer)

        def write() -> None:
            with writer.iteration(0):
                telemetry.emit_iteration(shard.rows, update)

        writing = cpu_ms(write)
    of_shard, of_all = SHARD_ENVS * STEPS, ENVS * STEPS
    return {
        "bytes gathered": f"{len(message) / of_shard:,.0f}",
        "of these the rollout buffer": f"{len(pickle.dumps(shard.buffer)) / of_shard:,.0f}",
        "of these rows": f"{len(pickle.dumps(shard.rows)) / of_shard:,.0f}",
        "rows": f"{len(shard.rows) / of_shard:.1f}",
        "unpickling, every process, ms": f"{cpu_ms(lambda: pickle.loads(message)) / of_shard:.4f}",
        "update, every process, ms": f"{updating / of_all:.2f}",
        "writing rows, the first process, ms": f"{writing / of_shard:.4f}",
        "bytes of a policy": f"{4 * sum(p.numel() for p in trainer.policy.parameters()):,}",
    }


def main() -> None:
    raise_loopback()
    print(f"{ENVS} environments, {STEPS} steps, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print("| processes | rollout s | update s | CPU s | CPU ms per environment-step | kB on the wire |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # The first run is not measured; it fills the cache of twin scores (scores of hosts without growth).
        measure(2, folder / "first", folder / "cache")
        for processes in (1, 2, 4):
            print(measure(processes, folder / f"run-{processes}", folder / "cache"), flush=True)
        print("\n| per environment-step | |\n|---|---|")
        for title, value in parts(folder).items():
            print(f"| {title} | {value} |")


if __name__ == "__main__":
    if INSIDE in sys.argv:
        main()
    else:
        again = [sys.executable, "-m", "benchmarks.scaling", INSIDE]
        os.execvp("unshare", ["unshare", "--map-root-user", "--net", *again])
