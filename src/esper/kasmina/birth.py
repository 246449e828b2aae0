"""Birth of seeds: checks of new seeds, and copies of blocks that start without effect."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import BlueprintSpec, specs_for
from esper.kasmina.blueprints.tokens import MIXING
from esper.kasmina.dry_run import call, layer_by_layer, untouched
from esper.kasmina.edits import Argument
from esper.kasmina.sites import Site
from esper.leyline.errors import BlueprintError

MASK_WARNING: Final = (
    "{} in {} cannot see the padding mask of the network, so padded tokens would influence others; plant it"
    " behind a block that takes the mask"
)
"""Warning with the names of a blueprint and of a slot."""


def fits(spec: BlueprintSpec, site: Site) -> bool:
    """Return whether a slot at ``site`` can hold a seed of ``spec``."""
    has_source = (site.block is not None or not spec.copies) and (site.pair is not None or not spec.widens)
    return site.width % spec.multiple_of == 0 and has_source


def is_offered(spec: BlueprintSpec, site: Site) -> bool:
    """Return whether controllers, races and diagnoses consider a seed of ``spec`` for a slot at ``site``:
    attention only where it can see the padding mask that the network takes."""
    return fits(spec, site) and not (site.hides_mask and spec.name in MIXING)


def check_fits(spec: BlueprintSpec, site: Site) -> None:
    """Raise BlueprintError if a slot at ``site`` cannot hold a seed of ``spec``; the error message lists
    blueprints that fit.
    """
    others = ", ".join(other.name for other in specs_for(spec.topology) if fits(other, site))
    if spec.widens and site.pair is None:
        raise BlueprintError(
            f"blueprint '{spec.name}' adds hidden units between two layers, and slot {site.name} has no pair"
            f" of layers for them: {site.no_pair or 'its host has a fixed width'}; choose from {others}"
        )
    if spec.copies and site.block is None:
        raise BlueprintError(
            f"blueprint '{spec.name}' copies the last block upstream, and slot {site.name} has none that can"
            f" be copied: {site.refusal or 'its host has no blocks'}; choose from {others}"
        )
    if not fits(spec, site):
        raise BlueprintError(
            f"blueprint '{spec.name}' needs a slot whose width is a multiple of {spec.multiple_of};"
            f" slot {site.name} is {site.width} wide. Change the host's width, or choose from"
            f" {others}"
        )


@contextmanager
def refusals(spec: BlueprintSpec, sample: Tensor) -> Iterator[None]:
    """Convert any error inside the context into a BlueprintError, for code that builds a seed and runs it on
    ``sample``."""
    try:
        yield
    except BlueprintError:
        raise
    except Exception as error:
        raise BlueprintError(
            f"blueprint '{spec.name}' fails on features of shape {tuple(sample.shape[1:])}: {error}"
        ) from error


def check_birth(spec: BlueprintSpec, seed: nn.Module, sample: Tensor) -> bool:
    """Run a copy of the seed on ``sample`` in training and evaluation mode, and check that its delta is
    allowed.

    Returns:
        Whether the seed draws random numbers in training mode, for example for dropout.

    Raises:
        BlueprintError: The seed has no parameters, or its delta is not finite, is not zero, or has another
            shape than ``sample``.
    """
    if not any(True for _ in seed.parameters()):
        raise BlueprintError(
            f"blueprint '{spec.name}' has no parameters, so its seed could not learn; give it a layer with"
            " weights"
        )
    # A copy of the seed is run, so that running statistics of the seed itself do not change.
    trial, sample = copy.deepcopy(seed).cpu(), sample.cpu()
    before = torch.get_rng_state()
    _check_delta(spec, trial.train(), sample)
    stochastic = not torch.equal(before, torch.get_rng_state())
    _check_delta(spec, trial.eval(), sample)
    return stochastic


def _check_delta(spec: BlueprintSpec, seed: nn.Module, sample: Tensor) -> None:
    """Raise BlueprintError unless the delta of a new seed has the shape of its input, is finite, and is
    exactly zero.

    The delta of a seed that copies a block may be non-zero. A seed must not change its input in place.
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


# --- copies that start without effect ----------------------------------------------------------------------


class Births(NamedTuple):
    """How copies of blocks start."""

    zero: bool = False
    """Whether the output projections of a copy start at zero, so that it has no effect at birth."""
    moments: bool = True
    """Whether the optimiser state of the copied block is copied too."""
    renew: float = 1.0
    """Factor by which the matrices of the present blocks of the same kind are shrunk, before fresh initial
    values times the rest are added; 1 leaves them unchanged."""


class BlockCall(NamedTuple):
    """Arguments of one call of a block."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def captured_call(net: nn.Module, block: nn.Module, sample: Any) -> BlockCall:
    """Return a copy of the arguments with which ``net`` calls ``block`` for ``sample``, in evaluation
    mode."""
    caught: list[BlockCall] = []

    def look(_module: nn.Module, args: Any, kwargs: Any) -> None:
        caught.append(BlockCall(*copy.deepcopy((args, kwargs))))

    handle = block.register_forward_pre_hook(look, with_kwargs=True)
    try:
        with untouched(net, training=False), layer_by_layer(), torch.no_grad():
            call(net, sample)
    finally:
        handle.remove()
    return caught[0]


def zero_outputs(
    block: nn.Module, called: BlockCall, features: Argument, output: Callable[[Any], Tensor]
) -> list[nn.Parameter]:
    """Set the output projections of a block to zero, so that the block returns its input features, and return
    these parameters.

    All parameters are set to zero; then, in the order of the forward pass, every parameter gets its values
    back unless the output would change. The last layers of the residual branches remain zero.

    Raises:
        BlueprintError: The block does not return its input with all parameters zero, so it is not residual;
            its parameters are unchanged.
    """

    def run() -> tuple[Tensor, Tensor]:
        args, kwargs = copy.deepcopy(called)
        h = features.value(args, kwargs).clone()
        return h, output(block(*args, **kwargs))

    with untouched(block, training=False), layer_by_layer(), torch.no_grad():
        parameters = _in_order_of_use(block, run)
        kept = [p.detach().clone() for p in parameters]
        for parameter in parameters:
            parameter.zero_()
        if not torch.equal(*run()):
            for parameter, values in zip(parameters, kept, strict=True):
                parameter.copy_(values)
            raise BlueprintError(
                f"a {type(block).__name__} does not return its input when all its weights are zero, so its"
                " copy cannot start without effect; plant it as a copy"
            )
        zero: list[nn.Parameter] = []
        for parameter, values in zip(parameters, kept, strict=True):
            parameter.copy_(values)
            if not torch.equal(*run()):
                parameter.zero_()
                zero.append(parameter)
    return zero


def _in_order_of_use(block: nn.Module, run: Callable[[], object]) -> list[nn.Parameter]:
    """Return the floating-point parameters of a block in the order in which its modules run."""
    order: list[nn.Module] = []
    handles = [m.register_forward_hook(lambda m, _args, _out: order.append(m)) for m in block.modules()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    used = [p for module in order for p in module.parameters(recurse=False)]
    return [p for p in dict.fromkeys([*used, *block.parameters()]) if p.is_floating_point()]
