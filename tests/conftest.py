"""What holds for every test: one thread per process, and the same examples in every run."""

import gc
import os

# Read once, when the OpenMP and MKL runtimes load, hence set before torch; subprocesses inherit them.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import pytest
import torch
from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Set up each process, the xdist workers included, before anything is collected."""
    torch.set_num_threads(1)
    # `--hypothesis-profile` on the command line wins: it looks for failures beyond the fixed examples.
    if not session.config.getoption("--hypothesis-profile"):
        settings.load_profile("ci")


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported and collected stays: looking through it for garbage takes a sixth of the time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """What is frozen is never freed, and libraries count that as leaks."""
    gc.unfreeze()
