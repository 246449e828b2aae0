"""Esper's own kernels for blocks of narrow CNNs (``conv_block.c``), built by the C compiler of the machine.

What they compute is what torch computes, up to rounding. Where there is no compiler, and wherever ``takes``
says no, torch's own operators run; ``kernels().description`` says which it is.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from esper.files.cache_folder import cache_folder

SOURCE, LAYOUT = (Path(__file__).with_name(name) for name in ("conv_block.c", "conv_layout.h"))
FLAGS: Final = ("-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math")
LARGE: Final = 2**18
"""Values of a feature map from which on the kernels are used."""
NARROW: Final = 32
"""Channels up to which they are faster than torch's."""
LARGEST_KERNEL: Final = 7
POOLED_MULTIPLE: Final = 16
"""Width of maps that the kernels can pool."""


class Kernels(NamedTuple):
    """The built library, or none."""

    library: ctypes.CDLL | None
    description: str


class BuildError(Exception):
    """Why there are no kernels on this machine."""


@cache
def kernels() -> Kernels:
    """Built or found in the cache at the first call."""
    try:
        compiler, version = _compiler()
        library = ctypes.CDLL(str(_built(compiler, version)))
    except (BuildError, OSError) as error:
        return Kernels(None, f"torch's ({error})")
    for function, pointers in ((library.conv_block_forward, 9), (library.conv_block_backward, 13)):
        function.argtypes = [ctypes.POINTER(_Shape), *[ctypes.c_void_p] * pointers]
    return Kernels(library, f"Esper's, built by {version}")


def _compiler() -> tuple[str, str]:
    """The C compiler, and how it names itself."""
    named = os.environ.get("CC")
    found = [path for name in ([named] if named else ["cc", "gcc"]) if (path := shutil.which(name))]
    if not found:
        raise BuildError(f"{named or 'a C compiler'} was not found; install gcc for faster convolutions")
    return found[0], _output_of([found[0], "--version"]).splitlines()[0]


def _built(compiler: str, version: str) -> Path:
    """The library in the cache; what it depends on is in its name."""
    parts = (SOURCE.read_text(), LAYOUT.read_text(), *FLAGS, version, _processor())
    name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
    folder = cache_folder("kernels")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
        raise BuildError(f"others may write to {folder}")
    path = folder / f"{name}.so"
    if not path.exists():
        # Under a name of its own, then renamed: many processes may start at once.
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / path.name
            _output_of([compiler, *FLAGS, "-shared", "-fPIC", str(SOURCE), "-o", str(made), "-lm"])
            made.replace(path)
    return path


def _output_of(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    except subprocess.CalledProcessError as error:
        said = (error.stderr.splitlines() or ["nothing"])[0]
        raise BuildError(f"{command[0]} failed: {said}") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{command[0]} failed: {error}") from None


def _processor() -> str:
    """What ``-march=native`` sees of the machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


# --- use -------------------------------------------------------------------------------------------


class _Shape(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_long) for name in ("samples", "ins", "outs", "height", "width", "kernel")),
        ("pools", ctypes.c_long),
        ("groups", ctypes.c_long),
        ("eps", ctypes.c_float),
    ]


class Norm(NamedTuple):
    """GroupNorm, with a ReLU behind it."""

    groups: int
    weight: Tensor
    bias: Tensor
    eps: float


def takes(x: Tensor, width: int | None = None, kernel: int = 1) -> bool:
    """Whether the kernels convolve features like ``x`` to as many as ``width`` channels."""
    wider = max(width or 0, x.shape[1])
    return (
        x.numel() * wider >= LARGE * x.shape[1]
        and wider <= NARROW
        and x.is_cpu
        and x.dtype is torch.float32
        and x.is_contiguous(memory_format=torch.channels_last)
        and kernel <= LARGEST_KERNEL
        and torch.get_num_threads() == 1
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not is_in_torch_dispatch_mode()  # somebody counts operators
        and kernels().library is not None
    )


def conv_block(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    alpha: Tensor | None = None,
    norm: Norm | None = None,
    pools: bool = False,
) -> Tensor:
    """A convolution of odd kernel that keeps the size; ``takes`` must hold for it.

    With ``alpha``, which learns nothing, it is scaled and added to ``x``. If it ``pools`` there is a 2×2 max
    pooling before it, with ``norm`` GroupNorm and ReLU behind it.
    """
    groups, gamma, beta, eps = norm or (0, None, None, 0.0)
    batch, channels, height, width = x.shape
    sides = (height // 2, width // 2) if pools else (height, width)
    shape = _Shape(batch, channels, weight.shape[0], *sides, weight.shape[2], pools, groups, eps)
    tensors = x, weight.contiguous(memory_format=torch.channels_last), bias, alpha, gamma, beta
    if not torch.is_grad_enabled():
        return _forward(shape, *tensors, None)[0]
    output: Tensor = _ConvBlock.apply(shape, *tensors)  # type: ignore[no-untyped-call]
    return output


class _ConvBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: _Shape, *tensors: Tensor) -> Tensor:
        x, weight, _, *others = tensors
        kept = x.new_empty(shape.samples, shape.outs, shape.height, shape.width) if shape.groups else None
        output, statistics = _forward(shape, *tensors, kept)
        ctx.shape = shape
        ctx.save_for_backward(x, weight, *others, kept, statistics)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _, gamma, beta, *_ = ctx.saved_tensors
        _, to_x, to_weight, to_bias, *_ = ctx.needs_input_grad
        to_input = torch.empty_like(x) if to_x else None
        to_parameters = (
            torch.empty_like(weight) if to_weight else None,
            x.new_zeros(len(weight)) if to_bias else None,
        )
        to_norm = [None if tensor is None else torch.zeros_like(tensor) for tensor in (gamma, beta)]
        grad = grad.contiguous(memory_format=torch.channels_last)
        _call("conv_block_backward", ctx.shape, *ctx.saved_tensors, grad, to_input, *to_parameters, *to_norm)
        return None, to_input, *to_parameters, None, *to_norm


def _forward(shape: _Shape, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and statistics; the last tensor is room for what ``backward`` needs, or ``None``."""
    size = shape.samples, shape.outs, shape.height, shape.width
    output = torch.empty(size, memory_format=torch.channels_last)
    statistics = torch.empty(shape.samples, shape.groups, 2)
    _call("conv_block_forward", shape, *tensors[:-1], output, tensors[-1], statistics)
    return output, statistics


def _call(function: str, shape: _Shape, *tensors: Tensor | None) -> None:
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    if getattr(kernels().library, function)(shape, *pointers):
        raise MemoryError("a convolution found no memory to work in")
