"""Set-up of a benchmark session: set one torch thread, and measure and print the FLOP rate of a matrix
product.

Benchmarks compare CPU times, and a second thread only adds CPU time on small tensors.
"""

import pytest
import torch

from benchmarks.timing import GEMM_FLOPS, cpu_times, figure, gemm, gflops


def pytest_sessionstart(session: pytest.Session) -> None:
    torch.set_num_threads(1)
    rate = gflops(GEMM_FLOPS, cpu_times({"gemm": gemm}, repeats=1)["gemm"])
    note = f"one thread, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"
    figure("matrix product, 1024 × 1024", rate, "GFLOP/s", note=note)
