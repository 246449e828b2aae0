"""Resident data: three splits, an endless cursor over the training part, and the guarded test part."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.leyline.errors import DataError


@dataclass(frozen=True, slots=True)
class Samples:
    """Inputs and targets, first axis the samples."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return int(self.x.shape[0])


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
        return replace(self, train=Samples(self.train.x[:count], self.train.y[:count]))

    def guess_loss(self) -> float:
        """Loss of a guess that knows how often each answer comes, and nothing else: the scale of a loss."""
        answers = self.train.y.flatten()
        counts = answers.bincount().double()
        if counts.count_nonzero() < 2:
            raise DataError(
                f"all {len(answers)} answers to train on are {int(answers[0])}, so there is nothing to learn;"
                " two different ones are the least: put other data there"
            )
        return float(torch.special.entr(counts / counts.sum()).sum())


class BatchCursor:
    """Endless shuffled minibatches of fixed size from a stream of its own.

    An epoch of the host is a number of minibatches, not a sweep; a sweep that does not divide
    evenly carries on, and leftovers smaller than a batch are dropped at the reshuffle.
    """

    def __init__(self, count: int, batch_size: int, generator: torch.Generator) -> None:
        if batch_size < 1 or batch_size > count:
            raise DataError(
                f"the batch size (={batch_size}) must be between 1 and the {count} training samples"
            )
        self._count = count
        self._batch_size = batch_size
        self._generator = generator
        self._order = torch.empty(0, dtype=torch.int64)
        self._position = 0

    def next(self) -> Tensor:
        """Indices of the next minibatch."""
        if self._position + self._batch_size > self._order.numel():
            self._order = torch.randperm(self._count, generator=self._generator)
            self._position = 0
        batch = self._order[self._position : self._position + self._batch_size]
        self._position += self._batch_size
        return batch

    def state(self) -> dict[str, Any]:
        return {
            "order": self._order.clone(),
            "position": self._position,
            "generator": self._generator.get_state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self._order = state["order"].clone()
        self._position = state["position"]
        self._generator.set_state(state["generator"])


def digest_of(*tensors: Tensor) -> str:
    """A digest of what the tensors hold."""
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
    cut = normalised([images[index] for index in parts])
    samples = [Samples(x, labels[index]) for x, index in zip(cut, parts, strict=True)]
    return Splits(samples[0], samples[1], GuardedTest(samples[2]))


def normalised(parts: Sequence[Tensor]) -> list[Tensor]:
    """Images ``[N, C, H, W]`` as floats; the first part, which is trained on, gets mean 0 and deviation 1."""
    std, mean = torch.std_mean(parts[0].float())
    return [
        ((part.float() - mean) / std.clamp_min(1e-6)).contiguous(memory_format=torch.channels_last)
        for part in parts
    ]


def shifted_and_flipped(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image ``[N, C, H, W]`` moved by up to an eighth of its side, half of them mirrored."""
    count, _, height, width = images.shape
    reach = max(height, width) // 8
    padded = F.pad(images, (reach,) * 4)
    down, right = (torch.randint(2 * reach + 1, (count, 1), generator=generator) for _ in range(2))
    mirrored = torch.randint(2, (count, 1), generator=generator).bool()
    rows = down + torch.arange(height)
    columns = torch.arange(width).expand(count, width)
    columns = right + torch.where(mirrored, columns.flip(1), columns)
    picked = padded[torch.arange(count)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return picked.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
