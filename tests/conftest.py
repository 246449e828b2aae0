"""Set up the test session: one torch thread per process, and the same hypothesis examples each time."""

import gc
import os
import signal
from collections.abc import Iterator

# When torch is imported, OpenMP and MKL read these numbers of threads; subprocesses inherit the variables.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import pytest
import torch
from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Set the number of torch threads and the hypothesis profile of each process, xdist workers included."""
    torch.set_num_threads(1)
    # A shell starts background jobs with Ctrl-C ignored, and the tests of Ctrl-C would wait for ever.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # The option `--hypothesis-profile` of pytest overrides the profile "ci", which always uses the same
    # examples.
    if not session.config.getoption("--hypothesis-profile"):
        settings.load_profile("ci")


@pytest.fixture(autouse=True)
def _fused_layers_stay_on() -> Iterator[None]:
    """Fail a test that leaves torch's fused transformer layers switched off in its process."""
    yield
    is_on = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(True)
    assert is_on


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude modules and collected tests from garbage collection, which saves a sixth of the test time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Undo gc.freeze; some libraries would take the frozen objects for memory leaks."""
    gc.unfreeze()
