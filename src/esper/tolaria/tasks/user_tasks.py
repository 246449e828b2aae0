"""Tasks on a user's own module, and tasks that are named by an import path."""

import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.random_streams import TorchStream
from esper.kasmina.sites import check_modes, find_sites
from esper.leyline import DataError, EsperError, HostError, LifecycleRules
from esper.tolaria.data import GuardedTest, Samples, Splits, digest_of
from esper.tolaria.tasks.spec import (
    CLASSIFICATION,
    InstanceDistribution,
    Objective,
    OptimiserKind,
    TaskSpec,
    regression,
)


def module_task(  # noqa: PLR0913  all but three by name
    build: Callable[[], nn.Module],
    inputs: Tensor,
    targets: Tensor,
    *,
    name: str,
    objective: Objective | None = None,
    slots: str | Sequence[str] = "auto",
    validation: float = 0.2,
    test: float = 0.2,
    optimiser: OptimiserKind = "adamw",
    learning_rate: float = 1e-3,
    batch_size: int = 64,
    batches_per_epoch: int = 16,
    horizon: int = 20,
    budget: int | None = None,
    incubation_epochs: int = 0,
) -> TaskSpec:
    """Return a task whose episodes train and grow a module of the user.

    Args:
        build: Function that returns a new module, with initial weights from torch's global generator.
        inputs: Inputs of all samples, ``[sample, …]``.
        targets: Class of each sample (whole numbers), or values to predict (floats).
        name: Name of the task in runs and reports.
        objective: Loss and score; cross entropy for classes and squared error for floats unless given.
        slots: Names of the submodules that get a slot, or globs of such names, or ``"auto"``.
        validation: Share of the samples for validation.
        test: Share of the samples for the test split, which is read once per episode.
        optimiser: Kind of optimiser, ``"adamw"`` or ``"sgd"``.
        learning_rate: Learning rate of host and seeds.
        batch_size: Number of samples of a minibatch.
        batches_per_epoch: Number of minibatches of an epoch, if no ``budget`` is given.
        horizon: Number of epochs of an episode.
        budget: Compute budget of an episode in FLOPs; without it an epoch has ``batches_per_epoch``
            minibatches.
        incubation_epochs: Number of epochs in which a new seed learns without changing the network's output.

    Raises:
        DataError: There are too few samples, or inputs and targets do not match.
        HostError: ``build`` returns no module, or a slot cannot be attached.

    Example of a task on a module of two linear layers:
        >>> task = module_task(lambda: nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1)), x, y, name="mine")
    """
    sizes = [round(share * len(inputs)) for share in (validation, test)]
    if len(inputs) != len(targets) or min(sizes) < 1 or len(inputs) - sum(sizes) < batch_size:
        raise DataError(
            f"task '{name}' has {len(inputs)} inputs and {len(targets)} targets; they must be as many, and"
            f" leave at least a minibatch of {batch_size} to train on besides {sizes[0]} for validation and"
            f" {sizes[1]} for the test"
        )
    with TorchStream(0):
        probe = build()
    if not isinstance(probe, nn.Module):
        raise HostError(f"build of task '{name}' returned {type(probe).__name__}; return a torch.nn.Module")
    sites = find_sites(probe, slots, inputs[:2])
    check_modes(probe, sites, inputs[:2])

    def load(generator: torch.Generator) -> Splits:
        order = torch.randperm(len(inputs), generator=generator)
        parts = order.split([len(inputs) - sum(sizes), *sizes])
        train, held_out, tested = (Samples(inputs, targets, part) for part in parts)
        return Splits(train, held_out, GuardedTest(tested))

    return TaskSpec(
        name=name,
        summary=f"{type(probe).__name__} of {build.__module__}, {len(inputs):,} samples",
        input_shape=tuple(inputs.shape[1:]),
        classes=0 if targets.is_floating_point() else int(targets.max()) + 1,
        load=load,
        digest=lambda: digest_of(inputs, targets),
        instances=InstanceDistribution(
            widths=(tuple(site.width for site in sites),), learning_rates=(learning_rate,)
        ),
        objective=objective or (regression(targets) if targets.is_floating_point() else CLASSIFICATION),
        horizon=horizon,
        batch_size=batch_size,
        batches_per_epoch=batches_per_epoch,
        budget=budget,
        optimiser=optimiser,
        rules=LifecycleRules(
            min_training_epochs=incubation_epochs,
            enters_at_once=not incubation_epochs,
            min_prune_age=3,
            embargo_epochs=2,
        ),
        build=build,
        sites=tuple(sites),
    )


@cache
def imported_task(path: str) -> TaskSpec:
    """Call the task factory named by ``package.module:function``; modules in the working directory can be
    imported.

    Raises:
        EsperError: The module or the function does not exist, or the function fails or returns no task.
    """
    module_name, _, attribute = path.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise EsperError(
            f"task '{path}': the module '{module_name}' cannot be imported ({error}); name it as in Python,"
            " from the working directory or an installed package"
        ) from None
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise EsperError(
            f"task '{path}': {module_name} has no function '{attribute}'; write one that takes nothing and"
            " returns esper.tolaria.tasks.module_task(…)"
        )
    try:
        found = factory()
    except EsperError:
        raise
    except Exception as error:
        raise EsperError(f"task '{path}' failed: {type(error).__name__}: {error}") from error
    return checked_task(found, path)


def checked_task(found: Any, name: str) -> TaskSpec:
    """Return ``found`` if it is a ``TaskSpec``, else raise ``EsperError``."""
    if not isinstance(found, TaskSpec):
        raise EsperError(
            f"task '{name}' returned {type(found).__name__}; return esper.tolaria.tasks.module_task(…)"
        )
    return found
