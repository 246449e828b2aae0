"""What must not stay unsaid: a seed that does not learn, a metric that says nothing."""

from __future__ import annotations

import math
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np

from esper.growth import surroundings
from esper.growth.body import GrowingBody
from esper.growth.events import GrowthEvent, Narrator
from esper.growth.measuring import Score
from esper.growth.slot import GrowthSlot

CONSTANT_EPOCHS: Final = 5
"""Equal scores in a row after which a metric is suspected of not seeing the network."""

AT_REST: Final = 0.01
"""Share of its highest value below which a learning rate moves nothing that counts."""


class Watch:
    """Compares seeds and scores with those of the epochs before."""

    def __init__(self, body: GrowingBody, narrator: Narrator) -> None:
        self._body = body
        self._narrator = narrator
        self._seen: dict[int, list[float]] = {}
        self._values: list[list[float]] = []
        self._copies: WeakKeyDictionary[GrowthSlot, float] = WeakKeyDictionary()
        """A weight beside each slot of a copy that got no seed, when its own network did."""
        self._highest_rate = 0.0
        self._given_up = surroundings.recompile_limits_hit()

    def born(self, slot: int) -> None:
        """A seed begins here."""
        self._seen[slot] = self._fingerprint(slot)
        self._copies.update({copy: _weight(copy) for copy in self._body.copies_left_behind(slot)})

    def check_copies(self) -> list[GrowthEvent]:
        """Warn of a copy that is updated and has not grown, such as an average that is kept by hand."""
        stale = [copy for copy, before in self._copies.items() if _weight(copy) != before]
        self._copies.clear()
        if not stale:
            return []
        sentence = (
            "a copy of the network is updated without having grown with it; after growth copy it anew, or"
            " keep the average in torch.optim.swa_utils.AveragedModel, which follows"
        )
        return [self._narrator.warning(sentence)]

    def check_seeds(self) -> list[GrowthEvent]:
        """Warn of seeds in the forward that did not change in this epoch, or broke."""
        events = []
        for slot in np.flatnonzero(self._body.table.in_forward[0]).tolist():
            now, seed = self._fingerprint(slot), self._narrator.seed(slot)
            if now == self._seen.get(slot):
                sentence = (
                    f"{seed} did not change: no gradient or no optimiser step reached it. Does its place run"
                    " in training, and does the optimiser that Growth was given step?"
                )
                events.append(self._narrator.warning(sentence, slot))
            if not all(map(math.isfinite, now)):
                sentence = f"{seed} has weights that are not finite; prune it or return to a checkpoint"
                events.append(self._narrator.warning(sentence, slot))
            self._seen[slot] = now
        return events + self.check_copies()

    def check_compiled(self) -> list[GrowthEvent]:
        """Warn when torch.compile has begun to run something uncompiled."""
        before, self._given_up = self._given_up, surroundings.recompile_limits_hit()
        if self._given_up <= before:
            return []
        return [
            self._narrator.warning(
                "torch.compile reached its recompile limit, and a part of the network runs uncompiled; raise"
                " torch._dynamo.config.recompile_limit, or look at TORCH_LOGS=recompiles"
            )
        ]

    def check_score(self, score: Score) -> list[GrowthEvent]:
        """Warn of a metric that is no number, or has not moved for epochs of real learning, in no batch."""
        values = list(score.values)
        if not math.isfinite(score.mean):
            return [self._narrator.warning(f"evaluate returned {score.mean:g}; nothing is decided on it")]
        rate = max((g["lr"] for o in self._body.membership.optimisers for g in o.param_groups), default=0.0)
        self._highest_rate = max(self._highest_rate, float(rate))
        if rate < AT_REST * self._highest_rate:
            return []  # at the end of a schedule nothing moves, and no metric need
        self._values = [*self._values, values] if self._values[-1:] == [values] else [values]
        if len(self._values) == CONSTANT_EPOCHS:
            sentence = f"evaluate returned the same {CONSTANT_EPOCHS} times; does it evaluate this network?"
            return [self._narrator.warning(sentence)]
        return []

    def _fingerprint(self, slot: int) -> list[float]:
        """A number per parameter of a seed that moves with any of its values."""
        return [float(p.detach().double().pow(2).sum()) for p in self._body.graft(slot).parameters()]

    def state(self) -> dict[str, Any]:
        return {"seen": dict(self._seen), "values": list(self._values), "rate": self._highest_rate}

    def load_state(self, state: dict[str, Any]) -> None:
        self._seen = {int(slot): list(found) for slot, found in state["seen"].items()}
        self._values, self._highest_rate = list(state["values"]), float(state["rate"])


def _weight(slot: GrowthSlot) -> float:
    """A number that moves with the weights of the submodule that a slot stands behind."""
    return float(sum(p.detach().double().pow(2).sum() for p in slot.parent[0].parameters()))
