"""Execution of independent jobs in several processes."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from esper.leyline import EsperError

T = TypeVar("T")


def in_processes(function: Callable[..., T], jobs: Sequence[tuple[Any, ...]], processes: int) -> Iterator[T]:
    """Yield ``function(*job)`` for every job in the order of completion.

    Args:
        function: Importable function, which is called with the items of one job as arguments.
        jobs: Tuples of arguments, one tuple per call of ``function``.
        processes: Number of processes; 1 runs all jobs in the calling process.

    Raises:
        EsperError: A worker process was killed.
    """
    if processes == 1:
        for job in jobs:
            yield function(*job)
        return
    context = multiprocessing.get_context("spawn")
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(min(processes, len(jobs) or 1), mp_context=context, initializer=_follow_parent)
    try:
        for future in as_completed([pool.submit(function, *job) for job in jobs]):
            yield future.result()
    except BrokenProcessPool:
        raise EsperError(
            "a process that shared the runs was killed, perhaps for want of memory; what was done is kept:"
            " run the same command with fewer --processes"
        ) from None
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - before:
            # Without terminate() the command would wait until the jobs in progress are done.
            child.terminate()
        raise
    pool.shutdown()


def _follow_parent() -> None:
    """Make a worker process ignore Ctrl-C, which the parent handles, and exit when the parent ends, even if
    the parent was killed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()
