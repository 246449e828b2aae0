"""Checks of the arguments of ``Growth`` and ``grow``, each refusal in one sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from numbers import Integral, Real
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from esper.kasmina.blueprints import all_blueprints
from esper.leyline.errors import EsperError, UnknownNameError


def check_length(epochs: Any, budget: Any) -> None:
    """Check that either ``epochs`` or a FLOP ``budget`` is given, and that it is finite and above 0."""
    if (epochs is None) == (budget is None):
        raise EsperError("say how long to train, once: epochs=… or budget=… in FLOPs")
    name, length = ("epochs", epochs) if budget is None else ("budget", budget)
    if not isinstance(length, Real) or not 0 < float(length) < math.inf:
        raise EsperError(f"{name} is {length!r}; it must be a number above 0")


def check_cost(cost: Any) -> None:
    """Check the unit in which candidates of races are weighed."""
    if cost not in ("seconds", "flops"):
        raise EsperError(
            f"cost is {cost!r}; pass 'seconds' to weigh candidates by measured seconds per training step, or"
            " 'flops', which is the same on every machine"
        )


def check_settings(mode: Any, **limits: Any) -> None:
    """Check that ``mode`` is the direction of a metric, and that each of ``limits``, such as ``max_seeds``,
    is None or a non-negative integer."""
    if mode not in ("min", "max"):
        found = "missing" if mode is None else repr(mode)
        raise EsperError(
            f"mode is {found}; pass 'min' if the metric is a loss, 'max' if larger values are better"
        )
    for name, limit in limits.items():
        if limit is not None and not (isinstance(limit, Integral) and int(limit) >= 0):
            raise EsperError(f"{name} is {limit!r}; it must be a whole number, 0 or more")


def check_blueprints(names: Any) -> tuple[str, ...]:
    """Return the names in the argument ``blueprints``; an empty tuple, for all blueprints, if it is None."""
    if names is None:
        return ()
    known = dict.fromkeys(spec.name for spec in all_blueprints())
    named = [names] if isinstance(names, str) else names
    if not (isinstance(named, Iterable) and (named := tuple(named))):
        raise EsperError(
            f"blueprints is {names!r}; name at least one, such as ['mlp_small'], or leave it out"
        )
    for name in named:
        if name not in known:
            raise UnknownNameError("blueprint", str(name), known)
    return named


def check_calibration(batches: Any) -> None:
    """Check the type of the calibration batches, without iterating: a new iterator of a DataLoader draws a
    random number."""
    if batches is not None and (not isinstance(batches, Iterable) or isinstance(batches, Iterator)):
        raise EsperError(
            f"calibrate is a {type(batches).__name__}; pass a DataLoader or a list of training batches, which"
            " can be read every epoch"
        )


def check_alpha(alpha: Any) -> None:
    if not isinstance(alpha, Real) or not 0.0 <= float(alpha) <= 1.0:
        raise EsperError(f"alpha is {alpha!r}; it must be from 0 to 1")


def check_steps(clip: Any, accumulate: Any, progress: Any) -> None:
    """Check the arguments of ``grow`` that concern single optimiser steps."""
    if clip is not None and not (isinstance(clip, Real) and 0 < float(clip) < math.inf):
        raise EsperError(f"clip is {clip!r}; it must be a number above 0, the largest norm of the gradient")
    if not isinstance(accumulate, Integral) or int(accumulate) < 1:
        raise EsperError(
            f"accumulate is {accumulate!r}; it must be a whole number of minibatches per optimiser step, 1 or"
            " more"
        )
    if progress not in (None, True, False):
        raise EsperError(f"progress is {progress!r}; pass True, False, or None for a line in terminals only")


def check_amp(amp: Any, device: torch.device) -> None:
    """Check that ``amp`` is a dtype in which autocast can train on ``device``."""
    if amp is None or amp == torch.bfloat16 or (amp == torch.float16 and device.type == "cuda"):
        return
    raise EsperError(
        f"amp is {amp!r} on {device.type}; pass torch.bfloat16, on a CUDA device also torch.float16, or leave"
        " amp out to train in the precision of the network"
    )


def check_metric(metric: Any, mode: Any) -> None:
    """Check that ``metric`` is a function with its direction ``mode``, or that both are left out."""
    if metric is None:
        if mode is not None:
            raise EsperError(
                f"mode is {mode!r} without a metric, and the loss is always minimised; pass metric= as well,"
                " or leave mode out"
            )
        return
    if not callable(metric):
        raise EsperError(
            f"metric is {type(metric).__name__}; pass a function that is called like the loss and returns"
            " one number"
        )
    check_settings(mode)


def device_named(device: Any) -> torch.device:
    """Return the device called ``device``; raise unless a number can be computed on it."""
    try:
        found = torch.device(device)
        torch.zeros(1, device=found).item()
    except (RuntimeError, TypeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise EsperError(
            f"device is {device!r}, which cannot be used here ({reason}); pass a torch device such as 'cpu'"
            " or 'cuda'"
        ) from error
    return found


def schedule_of(scheduler: Any, optimizer: Optimizer | None) -> tuple[LRScheduler | None, bool]:
    """Return the scheduler in the argument ``scheduler`` of ``grow``, and whether it is stepped after every
    optimiser step and not after every epoch."""
    interval, is_explicit = "epoch", isinstance(scheduler, dict)
    if is_explicit:
        if set(scheduler) != {"scheduler", "interval"} or scheduler["interval"] not in ("step", "epoch"):
            raise EsperError(
                f"scheduler is {scheduler!r}; as a dict it must be {{'scheduler': …, 'interval': 'step'}},"
                " with the interval 'step' or 'epoch'"
            )
        scheduler, interval = scheduler["scheduler"], scheduler["interval"]
    if scheduler is None:
        return None, False
    if not isinstance(scheduler, LRScheduler):
        found = scheduler.__name__ if isinstance(scheduler, type) else type(scheduler).__name__
        raise EsperError(
            f"scheduler is {found}; pass one of torch.optim.lr_scheduler, made from the optimizer of grow"
        )
    if isinstance(scheduler, CyclicLR | OneCycleLR) and not is_explicit:
        name = type(scheduler).__name__
        raise EsperError(
            f"{name} usually counts optimiser steps; pass {{'scheduler': {name}(…), 'interval': 'step'}}, or"
            " the interval 'epoch' if it counts epochs"
        )
    if isinstance(scheduler, ReduceLROnPlateau) and interval == "step":
        raise EsperError("ReduceLROnPlateau reads the metric of an epoch; pass it with the interval 'epoch'")
    if scheduler.optimizer is not optimizer:
        raise EsperError(
            f"scheduler is a {type(scheduler).__name__} of another optimiser; make it from the one that is"
            " passed as optimizer="
        )
    return scheduler, interval == "step"
