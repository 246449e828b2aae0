"""The default of ``esper.grow``: at a few shares of the training, a race says whether and where to plant.

Whoever has the loss and the data need not guess from a curve. Candidates learn for a few batches beside a
copy of the network that trains on (``race.py``), so going on is always one of the candidates. What the
races cost is a part of the training's compute, and limited to a share of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.growth.deciding import keep_or_remove, planting
from esper.growth.diagnosis import ERRORS, Row
from esper.growth.heats import Blueprints, Course, Heat, Race, race_of
from esper.growth.race import Limit, Runner
from esper.growth.sites import find_sites
from esper.growth.user_batches import Loss
from esper.leyline import ActionSpace, EpochFacts, LifecycleOp, SlotTable
from esper.leyline.legality import legal_slots_by_op
from esper.leyline.protocols import Decisions
from esper.tamiyo.controllers import wait_everywhere

MOMENTS: Final = (0.1, 0.3)
"""Shares of the training after which a race is run, at the next end of an epoch."""
SHARE: Final = 0.1
"""Of the training's compute, that all races together may take; of a short training the first takes all."""
COURSE: Final = Course((Heat(24, 4, 0.5), Heat(200, 1, 1.0)), in_training=True)
BLUEPRINTS: Final[Blueprints] = {
    "feature_map": ("conv_light",),
    "tokens": ("mlp_small", "attention"),
    "features": ("mlp_small",),
}
MOST_COST: Final = 4.0
"""Compute of a seed, in that of the network, above which it is not tried."""
PROMISE: Final = 0.01
"""Share of the loss that a doubling of the compute of a step must take away."""
LEAST_CHANGE: Final = 0.01
"""Share of the loss below which a change is not worth anything, whatever it costs."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a race needs of a training."""

    net: nn.Module
    optimizer: Optimizer
    loss: Loss
    loaders: tuple[Iterable[Any], Iterable[Any]]
    """Of training and of validation."""
    sample: Any
    max_params: int | None

    def controller(self, space: ActionSpace) -> RaceController:
        return RaceController(space, self)

    def ask(self, slots: Sequence[str], flops: float, grown_params: int) -> Answer:
        """Race in ``slots`` for at most so many FLOPs."""
        room = math.inf if self.max_params is None else self.max_params - grown_params
        limit = Limit(flops=flops)
        with race_of(self.net, *self.loaders, self.loss, self.optimizer, limit, COURSE) as race:
            race.find_candidates(find_sites(race.host, slots, self.sample), BLUEPRINTS)
            most = MOST_COST * race.host_flops
            race.candidates = [c for c in race.candidates if c.parameters <= room and c.flops <= most]
            if not race.candidates:
                return Answer(None, limit.spent, NOTHING_FITS)
            if not race.run():
                return Answer(None, limit.spent, TOO_SHORT)
            adopt(race.controls[0], self.net, self.optimizer)
            best = race.candidates[0].row()
            is_worth_it = is_worthwhile(race)
            return Answer(best if is_worth_it else None, limit.spent, _told(best, is_worth_it))


class Answer(NamedTuple):
    """What a race has found, and what it took."""

    best: Row | None
    """To be planted."""
    flops: float
    sentence: str


def adopt(control: Runner, net: nn.Module, optimizer: Optimizer) -> None:
    """Go on from where the control is: its batches are charged to the training, so they belong to it."""
    if control.has_diverged:
        return
    net.load_state_dict(control.net.state_dict())
    [theirs] = control.optimisers
    for own, other in zip(_parameters(optimizer), _parameters(theirs), strict=True):
        if other in theirs.state:
            optimizer.state[own] = theirs.state[other]


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


NOTHING_FITS: Final = "nothing was raced: every seed has too many parameters, or costs too much compute"
TOO_SHORT: Final = (
    "no race was run to its end: the training is too short for that; diagnose the network, and plan what to"
    " plant"
)


def _told(best: Row, is_worth_it: bool) -> str:
    assert best.beyond is not None
    lead, error = -best.beyond.mean, best.beyond.error
    what = f"{best.blueprint} in {best.place} won a race, {lead:+.2g} ± {error:.1g} ahead of training on"
    return what if is_worth_it else f"{what}: not enough to plant it"


def is_worthwhile(race: Race) -> bool:
    """Whether the winner's lead over the control is clear, and worth the compute that the seed adds.

    Both have seen the same batches. A seed that makes a step ``r`` times as expensive leaves ``1 / r`` of
    the steps, so it must give as much as ``log2(r)`` doublings of the training would.
    """
    best = race.candidates[0]
    assert best.beyond is not None
    lead, loss = -best.beyond.mean, abs(race.probe.mean(race.base))
    price = PROMISE * math.log2(1 + best.flops / race.host_flops)
    return lead > ERRORS * best.beyond.error and lead > max(price, LEAST_CHANGE) * loss


class RaceController:
    """One seed at a time: planted where a race finds one, kept or removed by its contribution."""

    name = "race"

    def __init__(self, space: ActionSpace, question: Question) -> None:
        self._space = space
        self._question = question
        self.reset(0)

    def reset(self, episode: int) -> None:
        """Nothing asked, nothing spent."""
        self._asked = 0
        self._spent = 0.0
        self.begin_epoch(0.0, 0.0)

    def begin_epoch(self, progress: float, flops: float) -> None:
        """How far the training is, as a share of it, and what it has spent."""
        self._progress = progress
        self._training_flops = flops / progress if progress else 0.0
        self.flops = 0.0
        """Spent on a race since this."""
        self.sentence: str | None = None
        """What that race found."""

    def decide(self, facts: EpochFacts, table: SlotTable) -> Decisions:
        decided = keep_or_remove(table, self._space)
        if decided is not None:
            return decided
        free = legal_slots_by_op(table, self._space.rules)[0][LifecycleOp.GERMINATE]
        due = sum(moment <= self._progress for moment in MOMENTS)
        if due <= self._asked or table.live.any() or not free.any():
            return Decisions(wait_everywhere(1))
        self._asked = due
        left = SHARE * self._training_flops - self._spent
        if self._spent and left < self._spent / 2:
            return Decisions(wait_everywhere(1))
        slots = [self._space.slot_config.slot_ids[i] for i in np.flatnonzero(free)]
        grown_params = int(facts.grown_params[0])
        best, self.flops, self.sentence = self._question.ask(slots, left, grown_params)
        self._spent += self.flops
        if self.sentence == TOO_SHORT:
            self._asked = len(MOMENTS)  # what is left does not become more
        if best is None:
            return Decisions(wait_everywhere(1))
        slot = self._space.slot_config.index_of(best.place)
        return planting(slot, self._space.blueprint_names.index(best.blueprint))

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self._asked, "spent": self._spent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._asked, self._spent = state["asked"], state["spent"]
