"""Diagnosis that measures whether a network is too small, and at which submodule.

Every blueprint at every site is scored by the training and validation gradients of a new seed. The candidates
with the best scores train briefly in the frozen network; then the best two candidates train longer, jointly
with the network. As a control, a copy of the network trains without a seed, with as much compute as a
candidate. The diagnosis runs on copies of the network and restores random states and loaders."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from esper.growth.argument_checks import check_cost
from esper.growth.batch_training import Loss, inputs_of
from esper.growth.diagnosis_report import Diagnosis
from esper.growth.growth import Growth
from esper.growth.race import Course, Heat, race_of
from esper.growth.race_candidates import candidates_at
from esper.growth.race_runners import Blueprints, CostUnit, Limit
from esper.growth.step_costs import StepCosts
from esper.growth.torch_wrappers import unwrapped
from esper.karn.notation import clock
from esper.kasmina.sites import Site, find_sites
from esper.kasmina.transaction import Transaction
from esper.leyline.errors import BlueprintError, DataError, HostError

BLUEPRINTS: Final[Blueprints] = {
    "feature_map": ("stack", "widen", "conv_light", "conv_heavy"),
    "volume": ("stack", "conv_small", "conv_light"),
    "tokens": ("stack", "widen", "mlp_small", "attention"),
    "features": ("stack", "widen", "lora", "mlp_small"),
}
"""Default candidates for each topology: one more block, more hidden units, a cheap side module and a larger
one."""
DIAGNOSIS_STEPS: Final = 1_500
"""Largest compute of a diagnosis by default, in training steps of the network."""
DIAGNOSIS: Final = Course((Heat(30, 8, 1 / 3), Heat(120, 2, 1.0)))
"""Heats of a diagnosis of at most ``DIAGNOSIS_STEPS``; if more steps are allowed, the last heat is longer in
proportion."""


def diagnose(  # noqa: PLR0913  all arguments but three are keyword-only
    net: nn.Module,
    train_loader: Iterable[Any],
    val_loader: Iterable[Any],
    *,
    loss: Loss,
    steps: int = DIAGNOSIS_STEPS,
    minutes: float = math.inf,
    slots: str | Sequence[str] = "auto",
    blueprints: Sequence[str] | None = None,
    sample: Any = None,
    optimizer: Optimizer | None = None,
    cost: CostUnit = "seconds",
    show: Callable[[str], object] = print,
) -> Diagnosis:
    """Measure whether a seed at some site, or training longer, would lower the validation loss.

    Without ``blueprints``, the candidates are one more block where the network has blocks, and side modules;
    candidates that are larger than the network are left out. The largest cost is shown before candidates are
    trained.

    Args:
        net: Network to diagnose; the network is not changed.
        train_loader: Training batches. Batches ``(inputs…, target)`` are used as
            ``loss(net(*inputs), target)``, all others as ``loss(net, batch)``.
        val_loader: Validation batches.
        loss: Loss function, called with output and target, or with network and batch.
        steps: Largest compute of the diagnosis, as a number of training steps of the network. With more than
            the default the race is longer in proportion, and finds gains that take longer to appear.
        minutes: Largest duration of the diagnosis in minutes.
        slots: Names or globs of the submodules after which seeds are tried, or ``"auto"``.
        blueprints: Names of the blueprints to try; one more block, more hidden units and
            side modules unless given.
        sample: Input that the network is called with; required if it cannot be read from a training batch.
        optimizer: Optimiser whose copy trains the control (the network without a seed) at its initial
            learning rate; without an optimiser, the control is trained by Adam at the best of three learning
            rates.
        cost: Unit in which the compute of candidates is weighed against training longer: measured
            ``"seconds"`` per training step, or ``"flops"``, which are the same on every machine.
        show: Function that receives the line with candidates and cost.

    Returns:
        Diagnosis with a verdict and a table of candidates; its method ``plant`` plants the recommended seed.

    Raises:
        DataError: A data loader or the loss function cannot be used.
        EsperError: ``cost`` is not valid.
        BlueprintError: No blueprint fits any site.

    Example:
        >>> diagnosis = esper.diagnose(net, train, validation, loss=F.cross_entropy, steps=400)
        >>> net = diagnosis.plant(net)
    """
    if not steps > 0 or not minutes >= 0:
        raise DataError(f"steps is {steps} and minutes {minutes}; both must be positive numbers")
    check_cost(cost)
    limit = Limit(60.0 * minutes, steps=steps)
    net = unwrapped(net)
    costs, [*first, last] = StepCosts(cost), DIAGNOSIS.heats
    longer = round(max(1.0, steps / DIAGNOSIS_STEPS) * last.steps)
    course = Course((*first, last._replace(steps=longer)))
    with race_of(net, train_loader, val_loader, loss, optimizer, limit, course, costs) as race:
        sample = inputs_of(race.training[0]) if sample is None else sample
        named = [blueprints] if isinstance(blueprints, str) else blueprints
        tried = BLUEPRINTS if named is None else dict.fromkeys(BLUEPRINTS, named)
        sites = find_sites(race.host, slots, sample)
        race.candidates = candidates_at(race.host, race.host_flops, sites, tried, sample)
        if named is None:
            size, fitting = sum(p.numel() for p in race.host.parameters()), race.candidates
            race.candidates = [c for c in fitting if c.parameters <= size and c.flops <= race.host_flops]
            if fitting and not race.candidates:
                raise BlueprintError(
                    f"every candidate is larger than the network of {size:,} parameters; to try them all the"
                    f" same, name them: blueprints={list(dict.fromkeys(c.blueprint for c in fitting))}"
                )
        if not race.candidates:
            reasons = _refusals(sites, named)
            because = f" ({min(reasons)})" if reasons else ""
            raise BlueprintError(
                f"none of the blueprints fits a place{because}; name others with blueprints=[…]"
            )
        tested = ", ".join(dict.fromkeys(each.blueprint for each in race.candidates))
        show(
            f"diagnosis of {race.name}: {len(race.candidates)} candidates ({tested}), compute of at most"
            f" {steps} training steps, about {clock(limit.expected_seconds)} (h:mm:ss) here"
        )
        race.run()
        diagnosis = race.diagnosis()
        diagnosis.sample = sample
        return diagnosis


def _refusals(sites: Sequence[Site], named: Sequence[str] | None) -> set[str]:
    """Return the reasons why none of the ``sites`` can hold a seed of the only blueprint that was named."""
    reasons = {"stack": [site.refusal for site in sites], "widen": [site.no_pair for site in sites]}
    return {reason for name in named or () for reason in reasons.get(name, ()) if reason}


def plant(net: nn.Module, place: str, blueprint: str, *, sample: Any, zero: bool = True) -> nn.Module:
    """Plant a permanent seed after the submodule ``place``.

    The network stays a plain module of its class. The output of the network does not change until the next
    training step, because the output of a new seed is zero; with ``widen`` it changes by rounding errors at
    most. Construct the optimiser after planting, or add
    the seed's parameters to the optimiser.

    Args:
        net: Network to grow.
        place: Name of the submodule after which the seed is planted.
        blueprint: Name of the seed's blueprint.
        sample: Input that the network is called with.
        zero: Whether the output projections of a block that ``stack`` inserts start at zero; otherwise the
            block is an exact copy, and the output of the network changes.

    Returns:
        The same object ``net``, with the seed.

    Raises:
        HostError: ``place`` matches several submodules, or a submodule that cannot have a slot.
        BlueprintError: The blueprint does not fit the output of the submodule; the network is unchanged.

    Example:
        >>> net = esper.plant(net, "layer2", "conv_light", sample=images)
    """
    before = Transaction([unwrapped(net)])
    try:
        only = [blueprint]
        growth = Growth(net, sample=sample, mode="min", slots=place, controller=None, blueprints=only)
        if len(growth.slots) != 1:
            names = ", ".join(growth.slots)
            raise HostError(
                f"place {place!r} names {len(growth.slots)} submodules ({names}); name one of them"
            )
        is_block = blueprint == "stack" and growth.network.sites[0].insertion is not None
        growth.germinate(growth.slots[0], blueprint, zero=zero and is_block)
        growth.finish(merge=False)
    except BaseException:  # KeyboardInterrupt (Ctrl-C) must remove the slots, too.
        before.undo()
        raise
    return net
