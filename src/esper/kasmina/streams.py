"""A torch random stream of its own, entered like a room.

Layers draw from torch's global generator, so a stream swaps its state in and the global one out.
What happens inside leaves the global state untouched, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor


class TorchStream:
    """A named sequence of random numbers for everything drawn inside ``with stream:``."""

    def __init__(self, seed: int) -> None:
        self._state = torch.Generator().manual_seed(seed).get_state()
        self._outer: Tensor | None = None

    def __enter__(self) -> TorchStream:
        if self._outer is not None:
            raise RuntimeError("a random stream cannot be entered twice")
        self._outer = torch.get_rng_state()
        torch.set_rng_state(self._state)
        return self

    def __exit__(self, *error: object) -> None:
        self._state = torch.get_rng_state()
        assert self._outer is not None, "left without being entered"
        torch.set_rng_state(self._outer)
        self._outer = None

    def get_state(self) -> Tensor:
        """The position in the stream."""
        return self._state.clone()

    def set_state(self, state: Tensor) -> None:
        """Continue from a position taken by ``get_state``."""
        self._state = state.clone()
