"""Training, validation and test splits of a data set that is stored once per device.

All environments share one data set, stored as it was read. The splits of an episode are sample indices into
the data set; images are normalised when they are used. The test split can be read once, after the commit.
"""

import hashlib
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from esper.leyline.errors import DataError
from esper.tolaria.devices import DEFAULT_DEVICE, Device, send

_residents: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Copies of each tensor of a data set on other devices, by device name."""


def resident(tensor: Tensor, device: Device) -> Tensor:
    """Return the one shared copy of ``tensor`` on ``device``; images are stored in channels_last format."""
    copies: dict[str, Tensor] = _residents.setdefault(tensor, {})
    if device.name not in copies:
        copy = tensor if device == DEFAULT_DEVICE else tensor.to(device.torch, copy=True)
        stored = copy.contiguous(memory_format=torch.channels_last) if copy.ndim == 4 else copy
        # A tensor that is both key and value of the dictionary with weak keys would never be freed.
        if stored is tensor:
            return tensor
        copies[device.name] = stored
    return copies[device.name]


class Scale(NamedTuple):
    """Mean and standard deviation of the pixels of the training split, for the normalisation of images."""

    mean: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, images: Tensor) -> Self:
        """Return mean and standard deviation of all pixels of the images."""
        deviation, mean = torch.std_mean(images.float())
        return cls(mean, deviation.clamp_min(1e-6))

    def apply(self, images: Tensor) -> Tensor:
        """Return normalised images ``[N, C, H, W]``; training images get mean 0 and deviation 1."""
        scaled = (images.float() - self.mean).div_(self.deviation)
        return scaled.contiguous(memory_format=torch.channels_last)


class Samples:
    """Split of a data set: inputs and targets ``[sample, ...]``, of the samples ``index`` if given."""

    def __init__(
        self, inputs: Tensor, targets: Tensor, index: Tensor | None = None, scale: Scale | None = None
    ) -> None:
        self.inputs = inputs
        self.targets = targets
        # Sample indices are int32 instead of int64 to halve the memory of an environment.
        self.index = (torch.arange(len(inputs)) if index is None else index).int()
        self.scale = scale

    def __len__(self) -> int:
        return len(self.index)

    def on(self, device: Device) -> "Samples":
        """Return the split with the same samples, taken from the copy of the data set on ``device``."""
        scale = self.scale and Scale(*(value.to(device.torch) for value in self.scale))
        return Samples(resident(self.inputs, device), resident(self.targets, device), self.index, scale)

    def first(self, count: int) -> "Samples":
        """Return a split with only the first ``count`` samples."""
        return Samples(self.inputs, self.targets, self.index[:count], self.scale)

    def scaled(self, inputs: Tensor) -> Tensor:
        """Return normalised ``inputs`` if they are images; tokens are returned unchanged."""
        return inputs if self.scale is None else self.scale.apply(inputs)

    # ``x`` and ``y`` gather their samples at every access, because a stored copy of the validation split
    # would be larger than the network.

    @property
    def x(self) -> Tensor:
        return self.scaled(self.inputs[send(self.index, self.inputs.device)])

    @property
    def y(self) -> Tensor:
        return self.targets[send(self.index, self.targets.device)]


class GuardedTest:
    """Test split that is locked until the commit and can be read once."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._unlocked = False
        self._read = False

    def unlock(self) -> None:
        """Allow one read of the test split; only the commit of a network may call this method."""
        self._unlocked = True

    def read(self) -> Samples:
        """Return the samples of the test split; possible once, after the commit.

        Raises:
            DataError: The network is not committed, or the samples were read before.
        """
        if not self._unlocked:
            raise DataError("the test split was read before the network was committed at its horizon")
        if self._read:
            raise DataError("the test split was read twice in one episode; it is read once, after the commit")
        self._read = True
        return self._samples

    def on(self, device: Device) -> "GuardedTest":
        """Return the test split on ``device``; the copy is locked if the original is locked."""
        moved = GuardedTest(self._samples.on(device))
        moved.load_state(self.state())
        return moved

    def state(self) -> dict[str, bool]:
        return {"unlocked": self._unlocked, "read": self._read}

    def load_state(self, state: dict[str, bool]) -> None:
        self._unlocked, self._read = state["unlocked"], state["read"]


@dataclass(frozen=True, slots=True)
class Splits:
    """Training, validation and test split of one episode."""

    train: Samples
    validation: Samples
    test: GuardedTest

    def with_less_to_train(self, share: float) -> Self:
        """Return the splits with only a ``share`` of the training samples, which are in random order."""
        count = max(round(share * len(self.train)), 1)
        return replace(self, train=self.train.first(count))

    def on(self, device: Device) -> "Splits":
        """Return training, validation and test split on ``device``."""
        return Splits(self.train.on(device), self.validation.on(device), self.test.on(device))

    def guess_loss(self) -> float:
        """Return the loss of the best constant prediction: the class frequencies, or the mean of the targets.

        Raises:
            DataError: All training targets are equal.
        """
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
    """Return the SHA-256 of the dtypes, shapes and values of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def split_images(
    images: Tensor, labels: Tensor, *, validation: int, test: int, generator: torch.Generator
) -> Splits:
    """Return random splits of images ``[N, C, H, W]``, normalised by the pixels of the training split."""
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
