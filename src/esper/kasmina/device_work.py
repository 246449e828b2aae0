"""Work on a device whose results are read later, so that several devices compute at the same time.

A copy to the CPU waits until the device has finished. Work on a device therefore copies nothing: it yields
each tensor whose values it needs, and continues with the values.
"""

from collections.abc import Generator
from typing import TypeVar

from torch import Tensor

from esper.leyline import FloatArray

T = TypeVar("T")

DeviceWork = Generator[Tensor, FloatArray, T]
"""Generator that yields tensors, receives the values of each as a float64 array of its shape, and returns a
result.
"""


def run_alone(work: DeviceWork[T]) -> T:
    """Run ``work`` to its end and copy every tensor to the CPU as soon as it is yielded."""
    try:
        tensor = next(work)
        while True:
            tensor = work.send(tensor.double().cpu().numpy())
    except StopIteration as end:
        result: T = end.value
        return result
