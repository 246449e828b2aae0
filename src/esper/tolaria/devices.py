"""Devices of environments by name, and their torch devices.

Data sets are stored by device name. ``cpu:0`` and ``cpu:1`` are the same torch device but two devices here,
each with its own copy of the data, so that runs on several devices can be tested on one CPU.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from esper.leyline.errors import EsperError

Amp = Literal["off", "bfloat16", "float16"]
CPU_NAMES: Final = 64
"""Number of device names for the CPU: cpu:0, cpu:1, ..."""


class DeviceError(EsperError):
    """Error: a device does not exist or does not support the requested precision."""


@dataclass(frozen=True, slots=True)
class Device:
    """Device with a name such as ``cpu``, ``cpu:1`` or ``cuda:0``."""

    name: str

    @property
    def torch(self) -> torch.device:
        """Torch device of this name."""
        kind, number = _parsed(self.name)
        return torch.device(kind) if kind == "cpu" else torch.device(kind, number)

    @property
    def is_cuda(self) -> bool:
        return self.torch.type == "cuda"

    def synchronise(self) -> None:
        """Wait until all work on a CUDA device is done; work on the CPU is never pending."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch)


DEFAULT_DEVICE: Final = Device("cpu")


class Compute(NamedTuple):
    """Device and precision of a host's training."""

    device: Device = DEFAULT_DEVICE
    amp: Amp = "off"


DEFAULT_COMPUTE: Final = Compute()


class WorkQueue:
    """CUDA stream of one environment; does nothing on the CPU."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device.torch) if device.is_cuda else None

    def enter(self, *inputs: Tensor) -> AbstractContextManager[object]:
        """Return a context whose work runs on the environment's CUDA stream, after all work submitted before.

        The tensors ``inputs`` were made on another CUDA stream; their memory is kept until the work is done.
        """
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device.torch))
        for tensor in inputs:
            tensor.record_stream(self._stream)
        return torch.cuda.stream(self._stream)


def device_of(env: int, names: Sequence[str]) -> Device:
    """Return the device of an environment; environments are assigned to devices in turn."""
    return Device(names[env % len(names)])


def describe_map(names: Sequence[str], envs: int) -> str:
    """Describe which environments run on which device."""
    parts = []
    for first, name in enumerate(names):
        own = [str(env) for env in range(first, envs, len(names))]
        shown = ", ".join(own if len(own) <= 6 else [*own[:3], "…", own[-1]])
        parts.append(f"{name} runs environment{'s' * (len(own) > 1)} {shown}")
    return "; ".join(parts)


def check_devices(names: Sequence[str]) -> None:
    """Raise DeviceError for unknown names, devices that do not exist, and one device named twice."""
    seen: dict[tuple[str, int], str] = {}
    if not names:
        raise DeviceError(f"no device was named; {_available()}")
    for name in names:
        kind, number = place = _parsed(name)
        if number >= (torch.cuda.device_count() if kind == "cuda" else CPU_NAMES):
            raise DeviceError(f"device '{name}' is not there; {_available()}")
        if place in seen:
            raise DeviceError(f"'{seen[place]}' and '{name}' are one device; name every device once")
        seen[place] = name


def check_enough(names: Sequence[str], envs: int) -> None:
    """Raise DeviceError if there are more devices than environments."""
    if len(names) > envs:
        raise DeviceError(
            f"{len(names)} devices ({', '.join(names)}) for {envs} environment{'s' * (envs != 1)} leave some"
            f" idle; name at most {envs}, or run more environments"
        )


def _parsed(name: str) -> tuple[str, int]:
    """Return kind and number of a device name; the number defaults to 0."""
    found = re.fullmatch(r"(cpu|cuda)(?::(\d{1,3}))?", name)
    if found is None:
        raise DeviceError(f"'{name[:80]}' names no device; {_available()}")
    return found[1], int(found[2] or 0)


def _available() -> str:
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    there = ", ".join(gpus) if gpus else "no CUDA device"
    return f"there are cpu (or cpu:0 to cpu:{CPU_NAMES - 1}, the same processor under many names) and {there}"
