"""Building the kernels: found again, said in words where they cannot be had."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from esper.kasmina import native
from esper.kasmina.layers import Conv2d

needs_kernels = pytest.mark.skipif(
    native.kernels().library is None, reason=f"kernels are {native.kernels().description}"
)

CONVOLVE = """
import torch
from esper.kasmina.layers import Conv2d
from esper.kasmina.native import kernels
torch.set_num_threads(1)
x = torch.ones(8, 8, 64, 64).contiguous(memory_format=torch.channels_last)
assert Conv2d(8, 8, 3)(x).shape == x.shape
print(kernels().description)
"""


def description_in(folder: Path, **variables: str) -> str:
    """What a process with another cache and other variables says of its kernels, after it has used them."""
    environment = {**os.environ, "ESPER_CACHE": str(folder), **variables}
    command = [sys.executable, "-c", CONVOLVE]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    return ran.stdout.strip()


@pytest.mark.skipif(shutil.which("cc") is None, reason="a C compiler is needed; there is none")
def test_where_there_is_a_compiler_they_are_built(tmp_path: Path) -> None:
    assert description_in(tmp_path).startswith("Esper's, built by "), "else all tests of kernels were skipped"


@needs_kernels
def test_they_are_built_once_per_machine(tmp_path: Path) -> None:
    assert description_in(tmp_path).startswith("Esper's, built by ")
    (built,) = (tmp_path / "kernels").iterdir()
    first = built.stat().st_mtime_ns
    assert description_in(tmp_path).startswith("Esper's, built by ")
    assert built.stat().st_mtime_ns == first


def test_without_a_compiler_torch_convolves_and_the_reason_is_told(tmp_path: Path) -> None:
    told = description_in(tmp_path, CC="no-such-compiler")
    assert told == "torch's (no-such-compiler was not found; install gcc for faster convolutions)"


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo one 1.0 && exit\necho no such flag >&2\nexit 1\n'
    )
    compiler.chmod(0o700)
    assert description_in(tmp_path, CC=str(compiler)) == f"torch's ({compiler} failed: no such flag)"


def test_a_library_that_others_could_have_put_there_is_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(0o777)
    assert description_in(tmp_path) == f"torch's (others may write to {tmp_path / 'kernels'})"


@needs_kernels
def test_whoever_counts_operators_sees_torchs() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.ones(8, 8, 64, 64).contiguous(memory_format=torch.channels_last)
    layer = Conv2d(8, 8, 3)
    assert native.takes(x)
    with FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() == 2 * 8 * 64 * 64 * 9 * 8 * 8
