"""One thread: ratios are of CPU time, and small tensors lose from a second one. First the machine's rate."""

import pytest
import torch

from benchmarks.measuring import GEMM_FLOPS, cpu_times, figure, gemm, gflops
from esper.kasmina.native import kernels


def pytest_sessionstart(session: pytest.Session) -> None:
    torch.set_num_threads(1)
    rate = gflops(GEMM_FLOPS, cpu_times({"gemm": gemm}, repeats=1)["gemm"])
    note = f"one thread, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"
    note += f"; kernels of convolutions are {kernels().description}"
    figure("matrix product, 1024 × 1024", rate, "GFLOP/s", note=note)
