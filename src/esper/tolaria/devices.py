"""Devices on which environments run, and the precision in which hosts and seeds are trained.

One copy of a data set is stored per device name. ``cpu:0`` and ``cpu:1`` are the same torch device but two
devices here, each with its own copy of the data, so that runs on several devices can be tested on one CPU.

The precision is float32, or mixed with bfloat16 or float16. Weights, optimiser states and gradients are
always float32, and scores are measured in float32. With float16, losses are scaled so that their gradients
do not vanish. Host and blended seeds have one loss scale, since their gradients come from one loss; every
incubating seed has its own.
"""

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from esper.kasmina.device_work import DeviceWork
from esper.leyline import FloatArray
from esper.leyline.errors import EsperError

T = TypeVar("T")
Amp = Literal["off", "bfloat16", "float16"]
CPU_NAMES: Final = 64
"""Number of device names for the CPU: cpu:0, cpu:1, ..."""
_TYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}
HOST: Final = -1
"""Key of the loss scaler for the host and its blended seeds; that of an incubating seed is its slot index."""
_UNSCALED: Final = GradScaler(enabled=False)
"""Loss scaler of all losses that are not scaled: it passes losses and gradients on unchanged."""


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


# --- precision ----------------------------------------------------------------------------------------


def check_amp(amp: Amp, names: Sequence[str]) -> None:
    """Raise ``DeviceError`` if one of the devices does not support the precision ``amp``."""
    for device in map(Device, names):
        if amp == "float16" and not device.is_cuda:
            raise DeviceError(
                f"amp float16 needs a CUDA device; '{device.name}' is none: take bfloat16, or leave amp off"
            )
        if amp == "bfloat16" and device.is_cuda and not _has_bfloat16(device):
            raise DeviceError(
                f"'{device.name}' cannot compute in bfloat16; take amp float16, or leave it off"
            )


def _has_bfloat16(device: Device) -> bool:
    with torch.cuda.device(device.torch):
        return torch.cuda.is_bf16_supported(including_emulation=False)


class Precision:
    """Autocast context and float16 loss scales of one environment."""

    def __init__(self, amp: Amp = "off", device: Device = DEFAULT_DEVICE) -> None:
        self._device = device.torch.type
        self._type = _TYPES.get(amp)
        self.scales = self._type is torch.float16
        self._scalers: dict[int, GradScaler] = {}
        self.skipped_steps = 0

    def autocast(self) -> AbstractContextManager[object]:
        """Return the autocast context in which a forward pass and its loss are computed."""
        return nullcontext() if self._type is None else torch.autocast(self._device, self._type)

    def part(self, number: int, parameters: Sequence[nn.Parameter]) -> "ScaledPart":
        """Return ``parameters``, which learn from one loss, together with the loss scale ``number`` of that
        loss.

        The number of a loss scale is the slot of an incubating seed, or ``HOST``.
        """
        return ScaledPart(self, parameters, self._scaler(number) if self.scales else _UNSCALED)

    def _scaler(self, part: int) -> GradScaler:
        return self._scalers.setdefault(part, GradScaler(self._device))

    def forget(self, slot: int) -> None:
        """Delete the loss scale of ``slot``, after its seed was planted, was removed, or left incubation."""
        self._scalers.pop(slot, None)

    def take_skipped_steps(self) -> int:
        """Return the number of optimiser steps skipped by loss scalers since the last call."""
        skipped, self.skipped_steps = self.skipped_steps, 0
        return skipped

    @property
    def overflows(self) -> bool:
        """Whether a loss scale has fallen below 1, so that gradients overflow even without scaling."""
        return any(scaler.get_scale() < 1.0 for scaler in self._scalers.values())

    def state(self) -> dict[str, Any]:
        return {str(part): scaler.state_dict() for part, scaler in self._scalers.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._scalers.clear()
        for part, kept in state.items():
            self._scaler(int(part)).load_state_dict(kept)


class ScaledPart:
    """Parameters that learn from one loss, with the interface that ``GradScaler`` needs of an optimiser."""

    def __init__(self, precision: Precision, parameters: Sequence[nn.Parameter], scaler: GradScaler) -> None:
        self._precision = precision
        self._parameters = list(parameters)
        self._scaler = scaler

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [{"params": self._parameters}]

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the loss with loss scaling, and divide them by the loss scale."""
        self._scaler.scale(loss).backward()
        self._scaler.unscale_(cast("Optimizer", self))

    @property
    def may_overflow(self) -> bool:
        """Whether the loss scale is above 1 and so may be the cause of a non-finite gradient."""
        return self._scaler.get_scale() > 1.0

    def drop(self) -> None:
        """Delete the gradients, so that the optimiser skips the parameters, and keep the loss scale."""
        for parameter in self._parameters:
            parameter.grad = None
        self._scaler.update(self._scaler.get_scale())

    def accept(self) -> None:
        """Update the loss scale, and delete the gradients if they overflowed."""
        are_finite = self._scaler.step(cast("Optimizer", self))
        self._scaler.update()
        if not are_finite:
            self._precision.skipped_steps += 1
            for parameter in self._parameters:
                parameter.grad = None

    def step(self) -> bool:
        """Return True to ``accept``: the loss scaler calls this method only if all gradients are finite."""
        return True
