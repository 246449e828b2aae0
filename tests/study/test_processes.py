"""Jobs in worker processes end when the process that started them ends."""

import multiprocessing
import os
import time

import pytest

from esper.leyline.errors import EsperError
from esper.study.processes import in_processes
from tests.integration.training import forked, gone


@pytest.fixture(autouse=True)
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiprocessing start method like spawn, but with torch already imported."""
    context = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(multiprocessing, "get_context", lambda how: context)


def identity_after(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def test_keyboard_interrupt_ends_unfinished_jobs_in_worker_processes():
    began = time.monotonic()
    jobs = in_processes(identity_after, [(0.0,), (600.0,), (600.0,)], 2)
    first = next(jobs)
    with pytest.raises(KeyboardInterrupt):
        jobs.throw(KeyboardInterrupt)
    assert gone(first)
    assert time.monotonic() - began < 300


def test_killed_worker_process_raises_an_error_of_one_sentence():
    with pytest.raises(EsperError, match="was killed, perhaps for want of memory; what was done is kept"):
        list(in_processes(os._exit, [(1,), (1,)], 2))


def ask_for_jobs(path: str) -> None:
    for found in in_processes(identity_after, [(0.0,), (600.0,)], 2):
        with open(path, "w") as file:
            file.write(f"{found}\n")


def test_worker_processes_end_when_their_parent_is_killed(tmp_path):
    path = tmp_path / "worker"
    parent = forked(ask_for_jobs, str(path))
    limit = time.monotonic() + 300
    while not (path.exists() and path.read_text().endswith("\n")) and time.monotonic() < limit:
        time.sleep(0.02)
    parent.kill()
    parent.join()
    assert gone(int(path.read_text()))
