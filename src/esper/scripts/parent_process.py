"""End of a worker process together with the process that started it, even if that process was killed."""

import ctypes
import os
import signal
import sys
import threading
import time
from typing import Final

PARENT_VARIABLE: Final = "ESPER_PARENT"
"""Environment variable with the id of the process that starts the workers of a training."""
SECONDS: Final = 1.0
"""Seconds between two checks whether the parent process is alive."""
_PR_SET_PDEATHSIG: Final = 1


def end_with_parent(parent: int) -> None:
    """End this process within about a second after its parent process ends.

    On Linux the kernel sends SIGKILL when the parent ends, so a worker that waits for other processes in a
    collective operation, or is stopped, ends too. The thread serves other systems, and a parent that ended
    before the kernel was asked.

    Args:
        parent: Id of the parent process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(SECONDS)
    os._exit(1)
