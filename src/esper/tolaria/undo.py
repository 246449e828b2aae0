"""Undo of one epoch: a snapshot that is valid as long as no seed is planted or removed."""

from itertools import chain

import torch
from torch.optim import Optimizer

from esper.kasmina.network import MorphogeneticModel
from esper.kasmina.optimizer_groups import clone_tree


class Undo:
    """Weights, statistics, optimiser state and random streams of a network at the time of construction."""

    def __init__(self, model: MorphogeneticModel, optimiser: Optimizer) -> None:
        self._tensors = [tensor.detach() for tensor in chain(model.parameters(), model.buffers())]
        self._values = [tensor.clone() for tensor in self._tensors]
        self._optimiser, self._state = optimiser, clone_tree(optimiser.state)
        streams = [slot.stream for slot in model.slots if slot.stream is not None]
        self._streams = [(stream, stream.get_state()) for stream in streams]

    def restore(self) -> None:
        """Return to the snapshot; this can be done once."""
        torch._foreach_copy_(self._tensors, self._values)
        self._optimiser.state.clear()
        self._optimiser.state.update(self._state)
        for stream, position in self._streams:
            stream.set_state(position)
