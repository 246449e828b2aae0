"""Independent random streams of torch, as context managers.

Layers such as dropout draw from torch's global generators. Inside the context of a random stream, torch's
global generators have the state of the stream; on exit their earlier state is restored, bit for bit.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

CUDA_STATE: Final = 16
"""Size in bytes of the state of a CUDA generator."""


class TorchStream:
    """Random stream: its own sequence of random numbers for all draws of torch inside ``with stream:``.

    For a CUDA ``device`` the stream holds the states of the CPU generator and the CUDA generator, because
    layers draw from both.
    """

    def __init__(self, seed: int, device: torch.device | None = None) -> None:
        self._cuda = device if device is not None and device.type == "cuda" else None
        self._state = torch.Generator().manual_seed(seed).get_state()
        if self._cuda is not None:
            own = torch.Generator(self._cuda).manual_seed(seed)
            self._state = torch.cat([self._state, own.get_state()])
        self._outer: Tensor | None = None

    def __enter__(self) -> TorchStream:
        if self._outer is not None:
            raise RuntimeError("a random stream cannot be entered twice")
        self._outer = self._global_state()
        self._set_global_state(self._state)
        return self

    def __exit__(self, *error: object) -> None:
        self._state = self._global_state()
        assert self._outer is not None, "left without being entered"
        self._set_global_state(self._outer)
        self._outer = None

    def _global_state(self) -> Tensor:
        state = torch.get_rng_state()
        return state if self._cuda is None else torch.cat([state, torch.cuda.get_rng_state(self._cuda)])

    def _set_global_state(self, state: Tensor) -> None:
        if self._cuda is None:
            torch.set_rng_state(state)
            return
        torch.set_rng_state(state[:-CUDA_STATE])
        torch.cuda.set_rng_state(state[-CUDA_STATE:], self._cuda)

    def get_state(self) -> Tensor:
        """Return the generator state of the random stream."""
        return self._state.clone()

    def set_state(self, state: Tensor) -> None:
        """Set the random stream to a generator state that ``get_state`` returned."""
        self._state = state.clone()
