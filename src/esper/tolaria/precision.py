"""The precision in which hosts and their seeds are trained: float32, or mixed.

Weights, optimisers and gradients are float32 in every case, and a network is measured in float32. A float16
gradient is scaled up lest it vanish: one scale for host and blended seeds, whose gradients come from one
loss, and one for every incubating seed.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from esper.kasmina.optim import step_together
from esper.tolaria.devices import DEFAULT_DEVICE, Amp, Device, DeviceError

_TYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}
HOST: Final = -1
"""Where slots have their numbers: the host with its blended seeds."""


def check_amp(amp: Amp, names: Sequence[str]) -> None:
    """Refuse a precision that one of the devices cannot compute in."""
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
    """How one environment's host and seeds compute, and the scales of their losses."""

    def __init__(self, amp: Amp = "off", device: Device = DEFAULT_DEVICE) -> None:
        self._device = device.torch.type
        self._type = _TYPES.get(amp)
        self.scales = self._type is torch.float16
        self._scalers: dict[int, GradScaler] = {}
        self._skipped_steps = 0

    def autocast(self) -> AbstractContextManager[object]:
        """Around a forward pass and its loss."""
        return nullcontext() if self._type is None else torch.autocast(self._device, self._type)

    def step_of(self, part: int, optimisers: Sequence[Optimizer]) -> "Step":
        """A step to come of ``part``: the slot of an incubating seed, or ``HOST``."""
        return Step(self, optimisers, self._scaler(part) if self.scales else None)

    def _scaler(self, part: int) -> GradScaler:
        return self._scalers.setdefault(part, GradScaler(self._device))

    def forget(self, slot: int) -> None:
        """The seed in ``slot`` is gone, or new, or incubates no more."""
        self._scalers.pop(slot, None)

    def note_skipped_step(self) -> None:
        """A step was left out because the scaled gradient overflowed."""
        self._skipped_steps += 1

    def take_skipped_steps(self) -> int:
        """How many there were since the last call."""
        skipped, self._skipped_steps = self._skipped_steps, 0
        return skipped

    @property
    def overflows(self) -> bool:
        """Gradients overflow though they are not scaled up any more: the scale is not to blame."""
        return any(scaler.get_scale() < 1.0 for scaler in self._scalers.values())

    def state(self) -> dict[str, Any]:
        return {str(part): scaler.state_dict() for part, scaler in self._scalers.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._scalers.clear()
        for part, kept in state.items():
            self._scaler(int(part)).load_state_dict(kept)


class Step:
    """One step of some optimisers on one loss; to a scaler they are a single optimiser."""

    def __init__(
        self, precision: Precision, optimisers: Sequence[Optimizer], scaler: GradScaler | None
    ) -> None:
        self._precision = precision
        self._optimisers = list(optimisers)
        self._scaler = scaler
        self._taken = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimiser in self._optimisers for group in optimiser.param_groups]

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients, at their own scale."""
        if self._scaler is None:
            loss.backward()
            return
        self._scaler.scale(loss).backward()
        self._scaler.unscale_(cast("Optimizer", self))

    @property
    def may_overflow(self) -> bool:
        """A gradient that is not finite is the scale's fault: ``take`` will lower it."""
        return self._scaler is not None and self._scaler.get_scale() > 1.0

    def leave_out(self, optimiser: Optimizer) -> None:
        """Take the step without this one."""
        self._optimisers.remove(optimiser)

    def drop(self) -> None:
        """Take no step, and let the scale be as it was."""
        if self._scaler is not None:
            self._scaler.update(self._scaler.get_scale())

    def take(self) -> None:
        """Move the weights, unless a scaled gradient overflowed."""
        if self._scaler is None:
            self.step()
            return
        self._scaler.step(cast("Optimizer", self))
        self._scaler.update()
        if not self._taken:
            self._precision.note_skipped_step()

    def step(self) -> None:
        step_together(self._optimisers)
        self._taken = True
