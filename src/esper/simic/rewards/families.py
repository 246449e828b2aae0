"""Reward families: which terms a reward consists of.

A family is a set of named potentials and a set of named costs. The terms of a step's reward are the change
of every potential and the costs, all times one scale; the reward is their sum. This is potential-based
shaping (Ng, Harada & Russell 1999) with potentials of the whole state and no discount: over an episode
the terms telescope to the difference between its end and its beginning.
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
RewardTerms = dict[str, Array]
"""The terms of one step by name, each ``[env]``; the reward is their sum."""


class RewardInputs(NamedTuple):
    """All that a reward may depend on after an epoch."""

    facts: EpochFacts
    table: SlotTable
    twin_score: Array
    """The do-nothing twin's at the same epoch; NaN for families that need none."""
    guess_loss: Array | float
    """Loss of a blind guess, by the data of each episode."""
    rent: Array | float
    """Price of a thousand grown parameters."""


Term = Callable[[RewardInputs], Array]


def _rent(s: RewardInputs) -> Array:
    return terms.rent_potential(s.facts.grown_params.astype(np.float64), s.rent)


def _pruned(s: RewardInputs) -> Flags:
    return (s.facts.last_op == LifecycleOp.PRUNE) & s.facts.last_success


@dataclass(frozen=True, slots=True)
class RewardFamily:
    """A definition of reward."""

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
    """The rewards of a vector of episodes under one family."""

    def __init__(self, family: RewardFamily, scale: float) -> None:
        self._family = family
        self._scale = scale

    def begin(self, inputs: RewardInputs) -> None:
        """Every episode is at its beginning: the untrained host."""
        self._at_birth = self._potentials(inputs)
        self._last = {name: value.copy() for name, value in self._at_birth.items()}

    def begin_again(self, env: int, inputs: RewardInputs) -> None:
        """One episode is at its beginning; ``inputs`` holds all of them."""
        for name, value in self._potentials(inputs).items():
            self._at_birth[name][env] = self._last[name][env] = value[env]

    def reward_terms(self, inputs: RewardInputs) -> RewardTerms:
        """The terms of the epoch that just ended.

        An episode that broke down loses what it had gained, and gets the penalty in the same step.
        """
        broken = inputs.facts.rolled_back
        rewards: RewardTerms = {}
        for name, value in self._potentials(inputs).items():
            now = np.where(broken, self._at_birth[name], value)
            rewards[name] = self._scale * (now - self._last[name])
            self._last[name] = now
        for name, cost in self._family.costs.items():
            rewards[name] = self._scale * cost(inputs)
        rewards["rollback"] = self._scale * terms.rollback(broken)
        return rewards

    def _potentials(self, inputs: RewardInputs) -> dict[str, Array]:
        return {name: term(inputs) for name, term in self._family.potentials.items()}


def total(rewards: RewardTerms) -> Array:
    """The reward ``[env]``."""
    return np.sum(list(rewards.values()), axis=0)
