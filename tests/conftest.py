"""Set up the test session: one thread per process, and the same hypothesis examples in every run."""

import gc
import os

# The OpenMP and MKL runtimes read these variables when torch is imported; subprocesses inherit them.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import pytest
import torch
from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Set the number of threads and the hypothesis profile of each process, xdist workers included."""
    torch.set_num_threads(1)
    # The option `--hypothesis-profile` overrides the profile "ci", to search beyond the fixed examples.
    if not session.config.getoption("--hypothesis-profile"):
        settings.load_profile("ci")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude modules and collected tests from garbage collection to save a sixth of the time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Undo gc.freeze, because some libraries report objects that are never freed as leaks."""
    gc.unfreeze()
