"""Reward families: which terms are paid, and the reward_log that they are entered in.

A family is a set of named potentials and a set of named costs. A step pays the change of every
potential and the costs as they are, all times one scale; the ledger keeps them apart, and the reward
is their sum. Potentials are taken of the whole state, so what they pay over an episode telescopes to the
difference between its end and its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import numpy as np

from esper.leyline import DEFAULT_GAMMA, EpochFacts, LifecycleOp, SlotTable
from esper.simic.rewards import terms
from esper.simic.rewards.terms import Array, Flags

FamilyName = Literal["paired", "contribution", "loss", "sparse"]
Ledger = dict[str, Array]
"""The terms of one step by name, each ``[env]``; the reward is their sum."""


class Standing(NamedTuple):
    """All that a reward may look at after an epoch."""

    facts: EpochFacts
    table: SlotTable
    twin_score: Array
    """The do-nothing twin's at the same epoch; NaN for families that need none."""
    guess_loss: Array | float
    """Loss of a blind guess, by the data of each episode."""
    rent: Array | float
    """Price of a thousand grown parameters."""


Term = Callable[[Standing], Array]


def _rent(s: Standing) -> Array:
    return terms.rent_potential(s.facts.grown_params.astype(np.float64), s.rent)


def _pruned(s: Standing) -> Flags:
    return (s.facts.last_op == LifecycleOp.PRUNE) & s.facts.last_success


@dataclass(frozen=True, slots=True)
class RewardFamily:
    """What is paid."""

    potentials: Mapping[str, Term]
    costs: Mapping[str, Term] = field(default_factory=dict)
    needs_twin: bool = False
    gamma: float = DEFAULT_GAMMA
    """Discount unless a configuration says otherwise."""


FAMILIES: Final[Mapping[FamilyName, RewardFamily]] = {
    "paired": RewardFamily(
        potentials={
            "lead": lambda s: terms.paired_potential(s.facts.val_score, s.twin_score),
            "rent": _rent,
        },
        needs_twin=True,
        gamma=1.0,
    ),
    "contribution": RewardFamily(
        potentials={
            "contribution": lambda s: terms.contribution_potential(s.table.contribution, s.table.in_forward),
            "rent": _rent,
        },
        costs={"churn": lambda s: terms.churn(_pruned(s))},
    ),
    "loss": RewardFamily(
        potentials={"loss": lambda s: terms.loss_potential(s.facts.val_loss, s.guess_loss), "rent": _rent},
    ),
    "sparse": RewardFamily(
        potentials={
            "score": lambda s: terms.final_potential(s.facts.val_score, s.facts.ended),
            "rent": lambda s: np.where(s.facts.ended, _rent(s), 0.0),
        },
        gamma=1.0,
    ),
}


class RewardFunction:
    """Judges the steps of a vector of episodes under one family."""

    def __init__(self, family: RewardFamily, scale: float) -> None:
        self._family = family
        self._scale = scale

    def begin(self, standing: Standing) -> None:
        """Every episode is at its beginning: the untrained host."""
        self._at_birth = self._potentials(standing)
        self._last = {name: value.copy() for name, value in self._at_birth.items()}

    def begin_again(self, env: int, standing: Standing) -> None:
        """One episode is at its beginning; ``standing`` holds all of them."""
        for name, value in self._potentials(standing).items():
            self._at_birth[name][env] = self._last[name][env] = value[env]

    def judge(self, standing: Standing) -> Ledger:
        """What the epoch that just ended pays.

        An episode that broke down loses what it had won, and pays the penalty in the same step.
        """
        broken = standing.facts.rolled_back
        ledger: Ledger = {}
        for name, value in self._potentials(standing).items():
            now = np.where(broken, self._at_birth[name], value)
            ledger[name] = self._scale * (now - self._last[name])
            self._last[name] = now
        for name, cost in self._family.costs.items():
            ledger[name] = self._scale * cost(standing)
        ledger["rollback"] = self._scale * terms.rollback(broken)
        return ledger

    def _potentials(self, standing: Standing) -> dict[str, Array]:
        return {name: term(standing) for name, term in self._family.potentials.items()}


def total(ledger: Ledger) -> Array:
    """The reward ``[env]``."""
    return np.sum(list(ledger.values()), axis=0)
