"""Diagnosis that measures whether a network is too small, and at which submodule.

One backward pass scores every blueprint at every site. The candidates with the best scores train briefly in
the frozen network; then the best two candidates train longer, jointly with the network. A copy of the network
trains without a seed for the same compute. The diagnosis runs on copies of the network and restores random
states and loaders."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from esper.growth.batch_training import Loss, inputs_of
from esper.growth.diagnosis_report import Diagnosis
from esper.growth.growth import Growth
from esper.growth.race import Blueprints, Course, Heat, race_of
from esper.growth.race_runners import Limit
from esper.growth.torch_wrappers import unwrapped
from esper.kasmina.sites import find_sites
from esper.leyline.errors import BlueprintError, HostError

BLUEPRINTS: Final[Blueprints] = {
    "feature_map": ("conv_light", "conv_heavy"),
    "tokens": ("mlp_small", "attention"),
    "features": ("lora", "mlp_small"),
}
"""Default candidates: a cheap blueprint and a larger one for each topology."""
DIAGNOSIS: Final = Course((Heat(30, 8, 1 / 3), Heat(120, 2, 1.0)))


def diagnose(  # noqa: PLR0913  all arguments but three are keyword-only
    net: nn.Module,
    train_loader: Iterable[Any],
    val_loader: Iterable[Any],
    *,
    loss: Loss,
    minutes: float = 2.0,
    budget: float = math.inf,
    slots: str | Sequence[str] = "auto",
    blueprints: Sequence[str] | None = None,
    sample: Any = None,
    optimizer: Optimizer | None = None,
) -> Diagnosis:
    """Measure whether a seed at some site, or training longer, would lower the validation loss.

    Args:
        net: Network to diagnose; the network is not changed.
        train_loader: Training batches. Batches ``(inputs…, target)`` are used as
            ``loss(net(*inputs), target)``, all others as ``loss(net, batch)``.
        val_loader: Validation batches.
        loss: Loss function.
        minutes: Limit in wall-clock minutes.
        budget: Limit in FLOPs.
        slots: Names of submodules to try, globs, or ``"auto"``.
        blueprints: Names of blueprints to try; two per topology unless given.
        sample: Input that the network is called with; required if it does not follow from a batch.
        optimizer: Optimiser whose copy trains the control at the initial learning rate; without it, Adam at
            the best of three learning rates.

    Returns:
        A diagnosis with a verdict, a table, and a method ``plant`` that plants the recommended seed.

    Raises:
        DataError: A loader or the loss cannot be used.
        BlueprintError: No blueprint fits any site.

    Example:
        >>> diagnosis = esper.diagnose(net, train, validation, loss=F.cross_entropy, minutes=1)
        >>> net = diagnosis.plant(net)
    """
    limit = Limit(60.0 * minutes, budget)
    net = unwrapped(net)
    with race_of(net, train_loader, val_loader, loss, optimizer, limit, DIAGNOSIS) as race:
        sample = inputs_of(race.training[0]) if sample is None else sample
        named = [blueprints] if isinstance(blueprints, str) else blueprints
        tried = BLUEPRINTS if named is None else dict.fromkeys(BLUEPRINTS, named)
        race.find_candidates(find_sites(race.host, slots, sample), tried)
        if not race.candidates:
            raise BlueprintError("none of the blueprints fits a place; name others with blueprints=[…]")
        race.run()
        diagnosis = race.diagnosis()
        diagnosis.sample = sample
        return diagnosis


def plant(net: nn.Module, place: str, blueprint: str, *, sample: Any) -> nn.Module:
    """Plant a permanent seed after the submodule ``place``.

    The network stays a plain module of its class. Its output does not change until the next training step,
    because the output of a new seed is zero. Construct the optimiser after planting, or add the seed's
    parameters to the optimiser.

    Args:
        net: Network to grow.
        place: Name of a submodule.
        blueprint: Name of the blueprint.
        sample: Input that the network is called with.

    Returns:
        ``net`` itself.

    Raises:
        HostError: ``place`` names no single submodule that can carry a slot.
        BlueprintError: The blueprint does not fit; the network is unchanged.
    """
    growth = Growth(net, sample=sample, slots=place, controller=None)
    try:
        if len(growth.slots) != 1:
            names = ", ".join(growth.slots)
            raise HostError(
                f"place {place!r} names {len(growth.slots)} submodules ({names}); name one of them"
            )
        growth.germinate(growth.slots[0], blueprint)
        growth.finish(merge=False)
    except BaseException:  # Ctrl-C also leaves the network unchanged.
        growth.detach()
        raise
    return net
