"""Names of the devices on which environments run, and the torch devices of these names.

One copy of a data set is stored per device name. ``cpu:0`` and ``cpu:1`` are the same torch device but two
devices here, each with its own copy of the data, so that runs on several devices can be tested on one CPU.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.device_work import DeviceWork
from esper.leyline import FloatArray
from esper.leyline.errors import EsperError

T = TypeVar("T")
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
        """Torch device that belongs to the device name."""
        kind, number = _parsed(self.name)
        return torch.device(kind) if kind == "cpu" else torch.device(kind, number)

    @property
    def is_cuda(self) -> bool:
        return self.torch.type == "cuda"


DEFAULT_DEVICE: Final = Device("cpu")


class Compute(NamedTuple):
    """Device and precision of a host's training."""

    device: Device = DEFAULT_DEVICE
    amp: Amp = "off"


DEFAULT_COMPUTE: Final = Compute()


class WorkQueue:
    """Device, CUDA stream and stopwatch of one environment; on the CPU there is no stream."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        """Seconds by phase of the present step, including the waiting for results of the device."""
        self._phase, self._since = "", 0.0
        self._stream = torch.cuda.Stream(device.torch) if device.is_cuda else None

    def begin(self, phase: str) -> None:
        """Count the seconds of the work that follows as part of ``phase``."""
        now = time.perf_counter()
        self.add_seconds(now - self._since)
        self._phase, self._since = phase, now

    def add_seconds(self, seconds: float) -> None:
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + seconds

    @contextmanager
    def entered(self, *inputs: Tensor) -> Iterator[None]:
        """Run the work inside the context on the environment's CUDA stream, after all earlier work, and count
        its seconds.

        The memory of ``inputs``, tensors made on another CUDA stream, is not reused before the work is done.
        """
        self._since = time.perf_counter()
        try:
            with self._streaming(inputs):
                yield
        finally:
            self.add_seconds(time.perf_counter() - self._since)

    def _streaming(self, inputs: Sequence[Tensor]) -> AbstractContextManager[object]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self.device.torch))
        for tensor in inputs:
            tensor.record_stream(self._stream)
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        """Let later work on the device, on the CUDA stream that is current now, wait for this environment."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device.torch).wait_stream(self._stream)


def run_together(works: Sequence[tuple[WorkQueue, DeviceWork[T]]]) -> list[T]:
    """Run the work of several environments and return their results.

    All work is started before the first tensor is copied to the CPU. The tensors that the environments of one
    device wait for are copied together, and these environments continue while other devices compute.
    """
    results: dict[int, T] = {}
    waiting: dict[int, Tensor] = {}

    def resume(index: int, values: FloatArray | None) -> None:
        queue, work = works[index]
        with queue.entered():
            try:
                waiting[index] = next(work) if values is None else work.send(values)
            except StopIteration as end:
                results[index] = end.value

    for index in range(len(works)):
        resume(index, None)
    while waiting:
        device = works[next(iter(waiting))][0].device
        group = [index for index in waiting if works[index][0].device == device]
        began = time.perf_counter()
        for index in group:
            works[index][0].join()
        found = _values([waiting.pop(index) for index in group])
        waited = (time.perf_counter() - began) / len(group)
        for index, values in zip(group, found, strict=True):
            works[index][0].add_seconds(waited)
            resume(index, values)
    for queue, _ in works:
        queue.join()
    return [results[index] for index in range(len(works))]


def _values(tensors: Sequence[Tensor]) -> list[FloatArray]:
    """Return the values of tensors of one device, in one copy to the CPU."""
    flat = torch.cat([tensor.flatten().double() for tensor in tensors]).cpu().numpy()
    ends = np.cumsum([tensor.numel() for tensor in tensors])
    parts = np.split(flat, ends[:-1])
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to ``device`` without waiting for the end of the copy."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def device_of(env: int, names: Sequence[str]) -> Device:
    """Return the device of an environment; environments are assigned to devices in turn."""
    return Device(names[env % len(names)])


def describe_map(names: Sequence[str], envs: int) -> str:
    """Return a text that lists the environments of every device."""
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
    """Split a device name such as ``cuda:1`` into kind and number; the number defaults to 0."""
    found = re.fullmatch(r"(cpu|cuda)(?::(\d{1,3}))?", name)
    if found is None:
        raise DeviceError(f"'{name[:80]}' names no device; {_available()}")
    return found[1], int(found[2] or 0)


def _available() -> str:
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    there = ", ".join(gpus) if gpus else "no CUDA device"
    return f"there are cpu (or cpu:0 to cpu:{CPU_NAMES - 1}, the same processor under many names) and {there}"
