"""Undo of one epoch: a snapshot that is valid as long as no seed is planted or removed."""

from collections.abc import Callable
from itertools import chain

import torch
from torch.optim import Optimizer

from esper.kasmina.network import MorphogeneticModel
from esper.kasmina.optimizer_groups import clone_tree


def undo_of(model: MorphogeneticModel, optimiser: Optimizer) -> Callable[[], None]:
    """Return a function that restores weights, statistics, optimiser state and random streams once."""
    tensors = [tensor.detach() for tensor in chain(model.parameters(), model.buffers())]
    values = [tensor.clone() for tensor in tensors]
    state = clone_tree(dict(optimiser.state))
    streams = [(slot.stream, slot.stream.get_state()) for slot in model.slots if slot.stream is not None]

    def restore() -> None:
        torch._foreach_copy_(tensors, values)
        optimiser.state.clear()
        optimiser.state.update(state)
        for stream, position in streams:
            stream.set_state(position)

    return restore
