"""Minibatches of several environments at once, from one resident data set per device."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from esper.kasmina.transfer import send
from esper.tolaria.data import Samples, Splits
from esper.tolaria.devices import Device


class Drawer(Protocol):
    """One environment's epoch: whose samples each minibatch is made of."""

    device: Device
    splits: Splits
    chosen: Sequence[Tensor]
    """By minibatch, as numbers within the training part."""


class Gathered(NamedTuple):
    """One environment's minibatch, as it is in the data set."""

    env: int
    """Which of the environments."""
    inputs: Tensor
    targets: Tensor


class SharedBatchIterator:
    """Minibatch by minibatch what every environment has drawn for it; those that have no more are left out.

    The samples of all environments on a device are gathered in one call, as long as they are of one data set.
    """

    def __init__(self, envs: Sequence[Drawer]) -> None:
        self._envs = envs

    def __iter__(self) -> Iterator[list[Gathered]]:
        for number in range(max((len(env.chosen) for env in self._envs), default=0)):
            gathered = [found for group in self._groups(number) for found in self._gather(group, number)]
            yield sorted(gathered, key=lambda found: found.env)

    def _groups(self, number: int) -> list[list[int]]:
        """The environments that have a minibatch of this number, by device and data set."""
        groups: dict[tuple[str, int], list[int]] = {}
        for at, env in enumerate(self._envs):
            if number < len(env.chosen):
                groups.setdefault((env.device.name, id(env.splits.train.inputs)), []).append(at)
        return list(groups.values())

    def _gather(self, group: Sequence[int], number: int) -> Iterator[Gathered]:
        samples = [self._envs[at].splits.train for at in group]
        chosen = [self._envs[at].chosen[number] for at in group]
        index = torch.cat([part.index[own] for part, own in zip(samples, chosen, strict=True)])
        inputs, targets = _taken(samples[0], send(index, self._envs[group[0]].device.torch))
        sizes = [len(own) for own in chosen]
        parts = zip(group, inputs.split(sizes), targets.split(sizes), strict=True)
        return (Gathered(at, x, y) for at, x, y in parts)


def _taken(samples: Samples, index: Tensor) -> tuple[Tensor, Tensor]:
    return samples.inputs[index], samples.targets[index]
