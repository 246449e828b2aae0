"""Checks of a new seed before it is attached to a slot: the seed fits the slot and returns a delta of
zero.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import BlueprintSpec, specs_for
from esper.leyline.errors import BlueprintError


def check_fits(spec: BlueprintSpec, slot: str, width: int, *, copyable: bool) -> None:
    """Raise BlueprintError if ``slot`` cannot hold a seed of ``spec``; the message names blueprints that
    fit.
    """
    others = ", ".join(s.name for s in specs_for(spec.topology) if s.fits(width, copyable=copyable))
    if spec.copies and not copyable:
        raise BlueprintError(
            f"blueprint '{spec.name}' copies the last block upstream, and slot {slot} has none: a module with"
            " parts, called with one tensor, whose shape it keeps (a Sequential stands for its last child);"
            f" choose from {others}"
        )
    if not spec.fits(width, copyable=copyable):
        raise BlueprintError(
            f"blueprint '{spec.name}' needs a slot whose width is a multiple of {spec.multiple_of};"
            f" slot {slot} is {width} wide. Change the host's width, or choose from"
            f" {others}"
        )


@contextmanager
def refusals(spec: BlueprintSpec, sample: Tensor) -> Iterator[None]:
    """Convert any error while a seed is built and tried into a BlueprintError."""
    try:
        yield
    except BlueprintError:
        raise
    except Exception as error:
        raise BlueprintError(
            f"blueprint '{spec.name}' fails on features of shape {tuple(sample.shape[1:])}: {error}"
        ) from error


def check_birth(spec: BlueprintSpec, seed: nn.Module, sample: Tensor) -> bool:
    """Run a copy of the seed on ``sample`` in training and evaluation mode and check its delta.

    Returns:
        Whether the seed draws random numbers in training mode.

    Raises:
        BlueprintError: The seed has no parameters, or its delta is not allowed.
    """
    if not any(True for _ in seed.parameters()):
        raise BlueprintError(
            f"blueprint '{spec.name}' has no parameters, so its seed could not learn; give it a layer with"
            " weights"
        )
    # A copy of the seed is run, so that the sample does not change the seed's running statistics.
    trial, sample = copy.deepcopy(seed).cpu(), sample.cpu()
    before = torch.get_rng_state()
    _check_delta(spec, trial.train(), sample)
    stochastic = not torch.equal(before, torch.get_rng_state())
    _check_delta(spec, trial.eval(), sample)
    return stochastic


def _check_delta(spec: BlueprintSpec, seed: nn.Module, sample: Tensor) -> None:
    """Raise BlueprintError unless the delta has the input's shape, is finite, and is zero at birth.

    The delta of a copied block may be non-zero. A seed must not change its input in place.
    """
    name, features = spec.name, sample.clone()
    with torch.no_grad():
        delta = seed(features)
    if not isinstance(delta, Tensor) or delta.shape != sample.shape:
        found = tuple(delta.shape) if isinstance(delta, Tensor) else type(delta).__name__
        raise BlueprintError(
            f"blueprint '{name}' must keep the shape of its input {tuple(sample.shape)}; it returned {found}"
        )
    if not torch.equal(features, sample):
        raise BlueprintError(
            f"blueprint '{name}' changes its input in place, and with it the host's features; leave out"
            " inplace=True and methods that end in an underscore"
        )
    if not torch.isfinite(delta).all():
        raise BlueprintError(
            f"blueprint '{name}' returned a non-finite delta at birth; look for a division by zero or an"
            " overflow in its forward"
        )
    if not spec.copies and torch.count_nonzero(delta):
        raise BlueprintError(
            f"blueprint '{name}' must return a delta of exactly zero at birth; its largest value"
            f" is {delta.abs().max().item():.3g}. Make it an esper.kasmina.Mirrored or start its last"
            " linear layer at zero"
        )
