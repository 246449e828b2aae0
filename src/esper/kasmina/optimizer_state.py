"""Optimiser state of parameters that grow."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Size, Tensor
from torch.utils._pytree import tree_map_only

Group = dict[str, Any]


class Enlarged(NamedTuple):
    """Parameter, or running statistics, replaced by a larger tensor with additional rows or columns."""

    old: Tensor
    parameter: Tensor
    """Parameter that replaces ``old``."""
    new: Tensor | None
    """Parameter with the values of the additional rows or columns; None if they are zero."""
    axis: int
    added: int
    """Number of additional rows or columns."""
    alpha: Tensor | None = None
    """Factor of the values of ``new``; None for 1."""


def joined(old: Tensor, new: Tensor | None, axis: int, added: int) -> Tensor:
    """Append ``added`` rows or columns to ``old``: zeros if ``new`` is None, else those of ``new``, which is
    padded with zeros to the size of ``old`` on other axes."""
    shape = [*old.shape]
    shape[axis] = added
    appended = old.new_zeros(shape)
    if new is not None:
        appended[tuple(map(slice, new.shape))] = new
    return torch.cat([old.detach(), appended], axis)


def grows_with(value: Any, before: Size) -> bool:
    """Return whether a value in the state of a parameter of shape ``before`` has this shape, except for axes
    of length 1, or is no array."""
    if not isinstance(value, Tensor) or value.numel() == 1:
        return True
    if value.ndim != len(before):
        return False
    return all(own in {1, old} for own, old in zip(value.shape, before, strict=True))


def extended(value: Any, before: Size, after: Size) -> Any:
    """Return a value in the state of a parameter, extended by zeros as the parameter was."""
    if not isinstance(value, Tensor) or value.numel() == 1:
        return value
    sizes = zip(value.shape, before, after, strict=True)
    extended = value.new_zeros([new if own == old else own for own, old, new in sizes])
    extended[tuple(map(slice, value.shape))] = value
    return extended


def joined_state(change: Enlarged, old: Group, new: Group, group: Group) -> Group:
    """Return the joined optimiser state of an enlarged parameter; an empty state if it cannot be joined."""
    state: Group = {}
    for name in {**old, **new}:
        value, other = old.get(name), new.get(name)
        known = value if value is not None else other
        if not isinstance(known, Tensor) or known.ndim == 0:
            state[name] = known
            continue
        if value is None:
            value = known.new_zeros(change.old.shape)
        fits = value.shape == change.old.shape
        if not fits or (other is not None and (change.new is None or other.shape != change.new.shape)):
            return {}
        if other is not None:
            other = other * _bias_correction(name, old, new, group)
        state[name] = joined(value, other, change.axis, change.added)
    return clone_tree(state)


_BETA_OF: Final = {"exp_avg": 0, "exp_avg_sq": 1, "max_exp_avg_sq": 1}
"""Index of the beta with which optimisers like Adam average a state."""


def _bias_correction(name: str, old: Group, new: Group, group: Group) -> float:
    """Return the factor of a moment of new parameters that have made fewer steps than the old parameters.

    Optimisers like Adam divide a moment by 1 - beta^steps, with the number of steps of the old parameters
    after moments were joined. The factor preserves the quotient.
    """
    if name not in _BETA_OF or "betas" not in group or not ("step" in old and "step" in new):
        return 1.0
    beta = float(group["betas"][_BETA_OF[name]])
    return (1.0 - beta ** float(old["step"])) / (1.0 - beta ** float(new["step"]))


def clone_tree(tree: Any) -> Any:
    """Return a copy of nested dicts and lists in which every tensor is cloned."""
    return tree_map_only(Tensor, Tensor.clone, tree)
