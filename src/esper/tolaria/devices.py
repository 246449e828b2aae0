"""Where environments run: our own names of devices, and what torch calls them.

The name is the key wherever something is kept by device. Torch calls ``cpu:0`` and ``cpu:1`` both ``cpu``; to
us they are two devices, each with its own copy of the data, so that what several devices do can be tried
where there is one.
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
"""Names that the processor may go by: cpu:0 and so on."""


class DeviceError(EsperError):
    """A device that is not there, or cannot do what is asked of it."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device by its name."""

    name: str

    @property
    def torch(self) -> torch.device:
        """What torch calls it."""
        kind, number = _parsed(self.name)
        return torch.device(kind) if kind == "cpu" else torch.device(kind, number)

    @property
    def is_cuda(self) -> bool:
        return self.torch.type == "cuda"

    def synchronise(self) -> None:
        """Wait until everything asked of the device is done; the processor does nothing later."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch)


DEFAULT_DEVICE: Final = Device("cpu")


class Compute(NamedTuple):
    """Where a host is trained, and in what precision."""

    device: Device = DEFAULT_DEVICE
    amp: Amp = "off"


DEFAULT_COMPUTE: Final = Compute()


class WorkQueue:
    """One environment's queue of work on its device: a CUDA stream, or, on a processor, nothing."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device.torch) if device.is_cuda else None

    def enter(self, *inputs: Tensor) -> AbstractContextManager[object]:
        """Work for this queue, which begins when everything asked for before it is done.

        ``inputs`` were made outside and must outlive the work on them.
        """
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device.torch))
        for tensor in inputs:
            tensor.record_stream(self._stream)
        return torch.cuda.stream(self._stream)


def device_of(env: int, names: Sequence[str]) -> Device:
    """The device of an environment: they are dealt out in turn."""
    return Device(names[env % len(names)])


def describe_map(names: Sequence[str], envs: int) -> str:
    """Which environments run where, in words."""
    parts = []
    for first, name in enumerate(names):
        own = [str(env) for env in range(first, envs, len(names))]
        shown = ", ".join(own if len(own) <= 6 else [*own[:3], "…", own[-1]])
        parts.append(f"{name} runs environment{'s' * (len(own) > 1)} {shown}")
    return "; ".join(parts)


def check_devices(names: Sequence[str]) -> None:
    """Refuse names of no device, of a device that is not there, and of one device twice."""
    seen: dict[tuple[str, int], str] = {}
    if not names:
        raise DeviceError(f"no device was named; {_what_is_there()}")
    for name in names:
        kind, number = place = _parsed(name)
        if number >= (torch.cuda.device_count() if kind == "cuda" else CPU_NAMES):
            raise DeviceError(f"device '{name}' is not there; {_what_is_there()}")
        if place in seen:
            raise DeviceError(f"'{seen[place]}' and '{name}' are one device; name every device once")
        seen[place] = name


def check_enough(names: Sequence[str], envs: int) -> None:
    """Refuse more devices than there are environments to run on them."""
    if len(names) > envs:
        raise DeviceError(
            f"{len(names)} devices ({', '.join(names)}) for {envs} environment{'s' * (envs != 1)} leave some"
            f" idle; name at most {envs}, or run more environments"
        )


def _parsed(name: str) -> tuple[str, int]:
    """Kind and number; a kind alone is its number 0."""
    found = re.fullmatch(r"(cpu|cuda)(?::(\d{1,3}))?", name)
    if found is None:
        raise DeviceError(f"'{name[:80]}' names no device; {_what_is_there()}")
    return found[1], int(found[2] or 0)


def _what_is_there() -> str:
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    there = ", ".join(gpus) if gpus else "no CUDA device"
    return f"there are cpu (or cpu:0 to cpu:{CPU_NAMES - 1}, the same processor under many names) and {there}"
