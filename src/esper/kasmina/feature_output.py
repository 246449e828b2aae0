"""Position of the features inside the return value of a submodule."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from torch import Tensor, fx

Holder = Literal["tensor", "tuple", "list", "namedtuple", "mapping", "dataclass"]
"""Kind of return value of a submodule: the feature tensor, or a container with it."""
FEATURE_RANKS = (2, 3, 4, 5)
"""Numbers of axes that features can have, with the batch axis."""
fx.wrap("replace")


class Output(NamedTuple):
    """Position of the features inside the return value of a submodule."""

    holder: Holder
    key: Any = None
    """Index or name of the feature tensor in the return value; None if the return value is the tensor."""

    def features(self, output: Any) -> Any:
        """Return the feature tensor in the return value of a submodule."""
        if self.holder == "tensor":
            return output
        return getattr(output, self.key) if self.holder in {"namedtuple", "dataclass"} else output[self.key]

    def replaced(self, output: Any, features: Tensor) -> Any:
        """Return ``output`` with its feature tensor replaced, as an object of the same type; ``torch.fx`` can
        trace this method."""
        holder, key = self
        if holder == "tensor":
            return features
        if holder == "tuple":
            return output[:key] + (features,) + output[key + 1 :]  # noqa: RUF005  a proxy cannot be unpacked
        if holder == "list":
            return output[:key] + [features] + output[key + 1 :]  # noqa: RUF005
        if holder == "namedtuple":
            return output._replace(**{key: features})
        if holder == "dataclass":
            return replace(output, **{key: features})
        return output | {key: features}


def find_output(output: Any, key: str = "") -> Output | None:
    """Return the position of the features in ``output``: the entry ``key``, or the first tensor of floats."""
    return next(outputs_in(output, key), None)


def outputs_in(output: Any, key: str = "") -> Iterator[Output]:
    """Return the positions of all features in ``output``, or that of the entry ``key``."""
    if isinstance(output, Tensor):
        if output.is_floating_point() and not key:
            yield Output("tensor")
        return
    holder: Holder
    entries: list[tuple[Any, Any]]
    if dataclasses.is_dataclass(output):
        holder = "dataclass"
        entries = [(field.name, getattr(output, field.name)) for field in dataclasses.fields(output)]
    elif isinstance(output, tuple) and hasattr(output, "_fields"):
        holder, entries = "namedtuple", list(zip(output._fields, output, strict=True))
    elif isinstance(output, tuple | list):
        holder, entries = "tuple" if isinstance(output, tuple) else "list", list(enumerate(output))
    elif isinstance(output, dict):
        holder, entries = "mapping", list(output.items())
    else:
        return
    for name, value in entries:
        if str(name) == key if key else _is_features(value):
            yield Output(holder, name)


def _is_features(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim in FEATURE_RANKS


def described(output: Any) -> str:
    """Return dtype and shape of a tensor, or the class of any other return value, for messages."""
    if isinstance(output, Tensor):
        return f"{output.dtype} of shape {tuple(output.shape)}"
    return type(output).__name__
