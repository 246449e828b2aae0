"""Minibatches: each environment draws sample indices, and one indexing call per device gathers the
samples."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.leyline.errors import DataError
from esper.tolaria.data import Splits
from esper.tolaria.devices import Device, send


class BatchCursor:
    """Endless sequence of shuffled minibatches of a fixed number of samples.

    The samples are reshuffled after each pass over the data; the last samples that do not fill a minibatch
    are dropped.
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
        """Return the sample indices of the next minibatch."""
        if self._position + self._batch_size > self._order.numel():
            self._order = torch.randperm(self._count, generator=self._generator).int()
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


class Drawer(Protocol):
    """Protocol of an environment that has drawn the sample indices of all minibatches of an epoch."""

    device: Device
    splits: Splits
    chosen: Sequence[Tensor]
    """Indices, within the training split, of the samples of each minibatch."""


class Gathered(NamedTuple):
    """Minibatch of one environment, in the dtype and layout of the data set."""

    env: int
    """Index of the environment in the argument ``envs`` of ``SharedBatchIterator``."""
    inputs: Tensor
    targets: Tensor


class SharedBatchIterator:
    """Iterator over the minibatches of an epoch: item k has the k-th minibatch of every environment.

    The minibatches of environments with the same device and data set are gathered in one indexing call.
    """

    def __init__(self, envs: Sequence[Drawer]) -> None:
        self._envs = envs

    def __iter__(self) -> Iterator[list[Gathered]]:
        for number in range(max((len(env.chosen) for env in self._envs), default=0)):
            groups: dict[tuple[str, int], list[int]] = {}
            for at, env in enumerate(self._envs):
                if number < len(env.chosen):
                    groups.setdefault((env.device.name, id(env.splits.train.inputs)), []).append(at)
            gathered = [found for group in groups.values() for found in self._gather(group, number)]
            yield sorted(gathered, key=lambda found: found.env)

    def _gather(self, group: Sequence[int], number: int) -> Iterator[Gathered]:
        samples = [self._envs[at].splits.train for at in group]
        chosen = [self._envs[at].chosen[number] for at in group]
        index = torch.cat([part.index[own] for part, own in zip(samples, chosen, strict=True)])
        index = send(index, self._envs[group[0]].device.torch)
        sizes = [len(own) for own in chosen]
        inputs, targets = samples[0].inputs[index].split(sizes), samples[0].targets[index].split(sizes)
        return map(Gathered, group, inputs, targets)


def shifted_and_flipped(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift each image ``[N, C, H, W]`` by up to an eighth of its side and mirror it with probability 1/2."""
    count, _, height, width = images.shape
    reach = max(height, width) // 8
    padded = F.pad(images, (reach,) * 4)
    down, right = (torch.randint(2 * reach + 1, (count, 1), generator=generator) for _ in range(2))
    mirrored = torch.randint(2, (count, 1), generator=generator).bool()
    rows = down + torch.arange(height)
    columns = torch.arange(width).expand(count, width)
    columns = right + torch.where(mirrored, columns.flip(1), columns)
    indices = (torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :])
    samples, rows, columns = (send(index, images.device) for index in indices)
    picked = padded[samples, :, rows, columns]
    return picked.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
