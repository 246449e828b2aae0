"""Counter of copies from a device to the CPU; it counts on the CPU too, where such copies cost nothing."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from esper.tolaria.env import MorphEnv


class Reads(TorchDispatchMode):
    """Calls that make the CPU wait for a device, in order; ``float()``, ``bool()`` and ``item()`` are scalar
    reads.

    Tensors whose data pointers are in ``on_cpu()`` are on the CPU for every device and are not counted.
    """

    def __init__(self, on_cpu: Callable[[], Collection[int]]) -> None:
        super().__init__()
        self.calls: list[str] = []
        self._on_cpu = on_cpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].data_ptr() not in self._on_cpu():
            self.calls.append("scalar")
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_reads(
    patch: pytest.MonkeyPatch, on_cpu: Callable[[], Collection[int]] = set, names: str = "cpu tolist"
) -> Iterator[Reads]:
    """Count scalar reads and calls of the tensor methods ``names`` inside the context."""
    reads = Reads(on_cpu)

    def counted(name: str) -> Callable[..., Any]:
        call = getattr(Tensor, name)

        def count(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            reads.calls.append(name)
            return call(tensor, *args, **kwargs)

        return count

    with patch.context() as context, reads:
        for name in names.split():
            context.setattr(Tensor, name, counted(name))
        yield reads


def step_counts(*envs: MorphEnv) -> set[int]:
    """Return the data pointers of AdamW's step counters, which are on the CPU for every device."""
    states = [state for env in envs for state in env.host.optimiser.state.values()]
    return {state["step"].data_ptr() for state in states if "step" in state}
