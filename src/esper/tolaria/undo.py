"""The moment before an epoch, to return to within it: cheap, since nobody grows or is removed meanwhile."""

from itertools import chain

import torch
from torch.optim import Optimizer

from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.optim import clone_tree


class Undo:
    """Weights, statistics, optimisers and slots' random streams of a model, as they were when it was made."""

    def __init__(self, model: MorphogeneticModel, optimiser: Optimizer) -> None:
        slots = [model.slot(index) for index in range(len(model.slots))]
        seeds = [slot.optimiser for slot in slots if slot.optimiser is not None]
        self._tensors = [tensor.detach() for tensor in chain(model.parameters(), model.buffers())]
        self._values = [tensor.clone() for tensor in self._tensors]
        self._optimisers = [(one, clone_tree(one.state)) for one in (optimiser, *seeds)]
        self._streams = [(slot.stream, slot.stream.get_state()) for slot in slots]

    def restore(self) -> None:
        """Go back; this can be done once."""
        torch._foreach_copy_(self._tensors, self._values)
        for optimiser, state in self._optimisers:
            optimiser.state.clear()
            optimiser.state.update(state)
        for stream, position in self._streams:
            stream.set_state(position)
