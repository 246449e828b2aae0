"""Precision in which hosts and seeds are trained: float32, or mixed with bfloat16 or float16.

Weights, optimiser states and gradients are always float32, and scores are measured in float32. With float16,
losses are scaled so that their gradients do not vanish. Host and blended seeds have one loss scale, since
their gradients come from one loss; every incubating seed has its own.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from esper.tolaria.devices import DEFAULT_DEVICE, Amp, Device, DeviceError

_TYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}
HOST: Final = -1
"""Number of the loss scale of the host and its blended seeds; an incubating seed uses its slot number."""
_UNSCALED: Final = GradScaler(enabled=False)
"""Loss scaler of all losses that are not scaled: it passes losses and gradients on unchanged."""


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
        self._accepted = False

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
        self._scaler.step(cast("Optimizer", self))
        self._scaler.update()
        if not self._accepted:
            self._precision.skipped_steps += 1
            for parameter in self._parameters:
                parameter.grad = None

    def step(self) -> None:
        """Record that the loss scaler, which calls this method, has found all gradients finite."""
        self._accepted = True
