"""Padding masks that a network passes to the submodule of a slot, so that attention seeds can respect them.

All functions on tensors consist of operations that ``torch.fx`` can trace, without branches on values: a
network may pass a mask in one forward pass and None in the next.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from esper.kasmina.dry_run import Call

_LOWEST = -5000.0
"""Scores below this value, which are added before a softmax, mask a token."""


class PaddingMask(NamedTuple):
    """Argument of a submodule that states which tokens are padding."""

    key: int | str
    """Position of the argument, or its name if the network passes it by name."""
    marks_padding: bool
    """Whether padded tokens are True, as in ``key_padding_mask`` of torch; otherwise they are False or 0, or
    their scores are low, as in ``attention_mask`` of transformers."""

    def visible(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], h: Tensor) -> Tensor:
        """Return which tokens are visible to which tokens, as ``[batch, 1, tokens, tokens]``; an axis may
        have length 1.

        Args:
            args: Positional arguments of the submodule, a tuple.
            kwargs: Keyword arguments of the submodule.
            h: Features of the slot, ``[batch, tokens, width]``.
        """
        given = kwargs.get(self.key) if isinstance(self.key, str) else args[self.key]
        nothing = h.new_zeros((1, 1)) if self.marks_padding else h.new_ones((1, 1))
        # Where a graph is traced, ``args`` is a proxy; ``is None`` and the index of a list cannot be traced.
        mask = (args[:0] + (given, nothing))[given == None]  # noqa: E711, RUF005
        mask = mask.reshape(mask.shape[0], 1, -1, mask.shape[-1])[..., -h.shape[1] :]
        if self.marks_padding:
            return (mask <= 0) & (mask > _LOWEST)
        # A mask of scores has no positive entry.
        has_positive = (mask > 0).any()
        return (has_positive & (mask > 0)) | (~has_positive & (mask > _LOWEST))


def find_mask(module: nn.Module, call: Call, tokens: int) -> PaddingMask | None:
    """Return the argument of a recorded call that is the padding mask; None if there is none.

    Args:
        module: Submodule that was called.
        call: Recorded call.
        tokens: Number of tokens in the features that the submodule returned.
    """
    names = list(inspect.signature(module.forward).parameters)
    given: list[tuple[int | str, str, Any]] = [
        (position, name, value) for position, (name, value) in enumerate(zip(names, call.args, strict=False))
    ]
    given += [(name, name, value) for name, value in call.kwargs.items()]
    fitting = [
        PaddingMask(key, names_padding(name))
        for key, name, value in given
        if (names_padding(name) or name == "attention_mask") and (value is None or _fits(value, tokens))
    ]
    return next((mask for mask in fitting if mask.marks_padding), next(iter(fitting), None))


def _fits(mask: Any, tokens: int) -> bool:
    is_mask = isinstance(mask, Tensor) and mask.ndim > 1 and mask.shape[-1] == tokens
    return is_mask and (mask.ndim < 4 or mask.shape[1] == 1)


def names_padding(name: str) -> bool:
    """Return whether an argument of this name marks padded tokens."""
    return "padding" in name and "mask" in name


def takes_mask(net: nn.Module) -> bool:
    """Return whether the forward of the network has an argument that may be a padding mask."""
    names = inspect.signature(net.forward).parameters
    return any("mask" in name or "padding" in name for name in names)
