"""Resident data: three splits of a data set, of which the test part is guarded.

A data set stays as it was read, once per device, whatever the number of environments. An episode's splits are
indices into it, and are brought to its scale as they are taken.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from esper.leyline.errors import DataError
from esper.tolaria.devices import DEFAULT_DEVICE, Device

_residents: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Copies of each tensor of a data set, by the name of the device they are on."""


def resident(tensor: Tensor, device: Device) -> Tensor:
    """The one copy of ``tensor`` on ``device``; images are stored in the order in which they are computed."""
    copies: dict[str, Tensor] = _residents.setdefault(tensor, {})
    if device.name not in copies:
        copy = tensor if device == DEFAULT_DEVICE else tensor.to(device.torch, copy=True)
        stored = copy.contiguous(memory_format=torch.channels_last) if copy.ndim == 4 else copy
        if stored is tensor:  # kept under itself it would never be let go
            return tensor
        copies[device.name] = stored
    return copies[device.name]


class Scale(NamedTuple):
    """What images are normalised by: mean and deviation of the training part."""

    mean: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, images: Tensor) -> Scale:
        deviation, mean = torch.std_mean(images.float())
        return cls(mean, deviation.clamp_min(1e-6))

    def apply(self, images: Tensor) -> Tensor:
        """Images ``[N, C, H, W]`` as floats; those of the training part have mean 0 and deviation 1."""
        scaled = (images.float() - self.mean).div_(self.deviation)
        return scaled.contiguous(memory_format=torch.channels_last)


class Samples:
    """Inputs and targets, first axis the samples: those of a data set that ``index`` names, or all."""

    def __init__(
        self, inputs: Tensor, targets: Tensor, index: Tensor | None = None, scale: Scale | None = None
    ) -> None:
        self.inputs = inputs
        self.targets = targets
        # Half the bytes: all that an environment keeps of a data set are its indices.
        self.index = (torch.arange(len(inputs)) if index is None else index).int()
        self.scale = scale

    def __len__(self) -> int:
        return len(self.index)

    def on(self, device: Device) -> Samples:
        """The same samples of the data set's copy on ``device``."""
        scale = self.scale and Scale(*(value.to(device.torch) for value in self.scale))
        return Samples(resident(self.inputs, device), resident(self.targets, device), self.index, scale)

    def first(self, count: int) -> Samples:
        return Samples(self.inputs, self.targets, self.index[:count], self.scale)

    def scaled(self, inputs: Tensor) -> Tensor:
        """``inputs`` of the data set as a network takes them."""
        return inputs if self.scale is None else self.scale.apply(inputs)

    # Gathered when asked for and not kept: a copy of the validation part would outweigh the network.

    @property
    def x(self) -> Tensor:
        return self.scaled(self.inputs[self.index.to(self.inputs.device)])

    @property
    def y(self) -> Tensor:
        return self.targets[self.index.to(self.targets.device)]


class GuardedTest:
    """The test part: locked until the network is committed, and read once."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._unlocked = False
        self._read = False

    def unlock(self) -> None:
        """Called by the commit at the horizon, and by nothing else."""
        self._unlocked = True

    def read(self) -> Samples:
        """The test samples; a second call, or one before the commit, is an error."""
        if not self._unlocked:
            raise DataError("the test split was read before the network was committed at its horizon")
        if self._read:
            raise DataError("the test split was read twice in one episode; it is read once, after the commit")
        self._read = True
        return self._samples

    def on(self, device: Device) -> GuardedTest:
        """The same test part on ``device``, as locked as this one."""
        moved = GuardedTest(self._samples.on(device))
        moved.load_state(self.state())
        return moved

    def state(self) -> dict[str, bool]:
        return {"unlocked": self._unlocked, "read": self._read}

    def load_state(self, state: dict[str, bool]) -> None:
        self._unlocked, self._read = state["unlocked"], state["read"]


@dataclass(frozen=True, slots=True)
class Splits:
    """One episode's data."""

    train: Samples
    validation: Samples
    test: GuardedTest

    def with_less_to_train(self, share: float) -> Splits:
        """The same with the first ``share`` of the training part, which is in random order."""
        count = max(round(share * len(self.train)), 1)
        return replace(self, train=self.train.first(count))

    def on(self, device: Device) -> Splits:
        return Splits(self.train.on(device), self.validation.on(device), self.test.on(device))

    def guess_loss(self) -> float:
        """Loss of a guess that knows how often each answer comes, and nothing else: the scale of a loss."""
        if self.train.targets.is_floating_point():
            targets = self.train.y
            return float((targets - targets.mean(dim=0)).square().mean())
        answers = self.train.y.flatten()
        counts = answers.bincount().double()
        if counts.count_nonzero() < 2:
            raise DataError(
                f"all {len(answers)} answers to train on are {int(answers[0])}, so there is nothing to learn;"
                " two different ones are the least: put other data there"
            )
        return float(torch.special.entr(counts / counts.sum()).sum())


def digest_of(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def split_images(
    images: Tensor, labels: Tensor, *, validation: int, test: int, generator: torch.Generator
) -> Splits:
    """Shuffle and cut into three; images ``[N, C, H, W]`` are normalised by the training part alone."""
    train = images.shape[0] - validation - test
    if train < 1:
        raise DataError(
            f"{images.shape[0]} samples cannot give {validation} for validation and {test} for test"
            " and leave any for training"
        )
    parts = torch.randperm(images.shape[0], generator=generator).split([train, validation, test])
    scale = Scale.of(images[parts[0]])
    samples = [Samples(images, labels, index, scale) for index in parts]
    return Splits(samples[0], samples[1], GuardedTest(samples[2]))
