"""Is a network too small, and where? Candidates race behind it, beside the same network trained longer.

One backward pass scores every blueprint at every place; the best of them learn for a short while behind the
frozen network, and the best two of these for longer, together with it. Beside them a copy of the network
trains on, with the same compute. Nothing of the user's is changed: the race runs on copies, and random states
and loaders are put back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import nn

from esper.growth.adding import SAMPLES
from esper.growth.diagnosis import Diagnosis
from esper.growth.heats import Blueprints, Course, Heat, race_of
from esper.growth.race import Limit
from esper.growth.sites import find_sites
from esper.growth.surroundings import unwrapped
from esper.growth.user_batches import Loss, inputs_of
from esper.leyline.errors import BlueprintError

BLUEPRINTS: Final[Blueprints] = {
    "feature_map": ("conv_light", "conv_heavy"),
    "tokens": ("mlp_small", "attention"),
    "features": ("lora", "mlp_small"),
}
"""Tried where none is named: a cheap one and one with more in it."""
DIAGNOSIS: Final = Course((Heat(30, 8, 1 / 3), Heat(120, 2, 1.0)))


def diagnose(  # noqa: PLR0913  what a user may say, by name
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
    optimizer: torch.optim.Optimizer | None = None,
) -> Diagnosis:
    """Say whether a seed at some place would lower the validation loss, and whether training longer would.

    Batches ``(inputs…, target)`` are used as ``loss(net(*inputs), target)``, all others as
    ``loss(net, batch)``. ``slots`` and ``blueprints`` name the places and kinds of seeds to try;
    ``sample`` is what the network is called with, where a batch is not that. With
    ``optimizer`` the control trains on with a copy of it, at the rate it began with; else with Adam at the
    best of three rates. Neither ``minutes`` nor ``budget``, in FLOPs, is exceeded.
    """
    limit = Limit(60.0 * minutes, budget)
    net = unwrapped(net)
    with race_of(net, train_loader, val_loader, loss, optimizer, limit, DIAGNOSIS) as race:
        SAMPLES[net] = inputs_of(race.training[0]) if sample is None else sample
        named = [blueprints] if isinstance(blueprints, str) else blueprints
        tried = BLUEPRINTS if named is None else dict.fromkeys(BLUEPRINTS, named)
        race.find_candidates(find_sites(race.host, slots, SAMPLES[net]), tried)
        if not race.candidates:
            raise BlueprintError("none of the blueprints fits a place; name others with blueprints=[…]")
        race.run()
        return race.diagnosis()
