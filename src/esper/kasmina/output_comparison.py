"""Comparison of the outputs of a network before and after a change."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from esper.kasmina.dry_run import call, tensors_in, untouched
from esper.leyline import HostError

MERGED_TOLERANCE: Final = (1e-4, 1e-5)
"""Relative and absolute tolerance for outputs if weights were merged, since a merge changes the order of
summation; without a merge, outputs must be bit-equal.
"""

EVAL: Final = "in eval mode"
"""Start of the names of outputs in evaluation mode."""

Outputs = dict[str, list[Tensor]]
"""Outputs of a network by mode, such as ``in eval mode with grad``."""


def outputs_of(net: nn.Module, sample: Any) -> Outputs:
    """Return all tensors that ``net`` returns for the sample: in training and evaluation mode, each with and
    without gradients.
    """
    found: Outputs = {}
    if sample is None:
        return found
    for training in (False, True):
        for grad in (False, True):
            with untouched(net, training=training), torch.set_grad_enabled(grad):
                result = [t.detach().clone() for t in tensors_in(call(net, sample))]
            found[f"in {'train' if training else 'eval'} mode with{'' if grad else 'out'} grad"] = result
    return found


def are_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    """Return whether two lists of tensors are bit-equal; NaN is equal to NaN."""
    return all(
        torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(some, others, strict=True)
    )


def compare(wanted: Outputs, found: Outputs, slot: str, *, exact: bool) -> None:
    """Raise HostError if outputs differ: at all or, unless ``exact``, by more than the tolerance.

    Args:
        wanted: Outputs before the change; ``found`` has the outputs after it.
        found: Outputs in the same modes, and possibly in others.
        slot: Name of the slot in the error message.
        exact: Whether outputs must be bit-equal.
    """
    rtol, atol = (0.0, 0.0) if exact else MERGED_TOLERANCE
    for how, before in wanted.items():
        try:
            torch.testing.assert_close(found[how], before, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            raise HostError(
                f"slot {slot}: the finished network differs {how} from the one that was trained"
                f" ({str(error).splitlines()[0]}); nothing was changed"
            ) from None
