"""Worker processes end when the process that started them is killed."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from torch.distributed import HashStore

from esper.scripts import cli
from esper.scripts.parent_process import end_with_parent
from tests.integration.training import forked, gone, is_alive

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds child processes in /proc")
SECONDS = 3600.0
"""Seconds that a worker would live if it did not end with its parent process."""
START = 300.0
"""Longest time in seconds that the tests wait for the start of a process."""
LIMIT = 30.0
"""Longest time in seconds between the end of a parent process and that of its workers, on a busy machine."""


def children_of(parent: int, number: int) -> list[int]:
    """Wait until a process has ``number`` child processes and return their ids."""
    limit = time.monotonic() + START
    while time.monotonic() < limit:
        found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        if len(found) == number:
            return [int(child) for child in found]
        time.sleep(0.02)
    raise AssertionError(f"process {parent} has {found}")


def assert_workers_end(parent: BaseProcess, workers: list[int]) -> None:
    parent.kill()
    parent.join()
    limit = time.monotonic() + LIMIT
    try:
        assert all(gone(worker, limit - time.monotonic()) for worker in workers)
    finally:
        for worker in filter(is_alive, workers):
            os.kill(worker, signal.SIGKILL)


def train_in_two_processes(out: Path) -> None:
    cli.main(["train", "--processes", "2", "--envs", "4", "--out", str(out)])


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_workers_of_a_training_end_if_its_parent_is_killed_while_they_start(
    seconds: float, tmp_path: Path
) -> None:
    parent = forked(train_in_two_processes, tmp_path / "run")
    workers = children_of(parent.pid, 2)
    time.sleep(seconds)
    assert_workers_end(parent, workers)


def wait_in_a_collective() -> None:
    """Block as gloo does while it waits for other ranks, without running Python's signal handlers."""
    HashStore().wait(["nothing"], timedelta(seconds=SECONDS))


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def bound_to(parent: int, ready: Path, then: Callable[[], None]) -> None:
    end_with_parent(parent)
    ready.touch()
    then()


def start(ready: Path, then: Callable[[], None]) -> None:
    """Start one worker that does ``then``, as a process of torchrun would."""
    multiprocessing.get_context("fork").Process(target=bound_to, args=(os.getpid(), ready, then)).start()
    time.sleep(SECONDS)


@pytest.mark.parametrize("then", [wait_in_a_collective, stop])
def test_worker_that_is_blocked_or_stopped_ends_if_its_parent_is_killed(
    then: Callable[[], None], tmp_path: Path
) -> None:
    parent = forked(start, tmp_path / "ready", then)
    workers = children_of(parent.pid, 1)
    limit = time.monotonic() + START
    while not (tmp_path / "ready").exists() and time.monotonic() < limit:
        time.sleep(0.02)
    assert_workers_end(parent, workers)


def test_worker_ends_if_its_parent_ended_before_the_worker_was_bound_to_it(tmp_path: Path) -> None:
    worker = forked(bound_to, 2**30, tmp_path / "ready", wait_in_a_collective)
    worker.join(START)
    code = worker.exitcode
    worker.kill()
    assert code == 1
