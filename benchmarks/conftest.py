"""One thread: ratios are of CPU time, and small tensors lose from a second one."""

import pytest
import torch


def pytest_sessionstart(session: pytest.Session) -> None:
    torch.set_num_threads(1)
