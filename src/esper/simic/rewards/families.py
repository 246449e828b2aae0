"""Reward families: which terms a reward consists of.

A family is a set of named potentials and a set of named costs. The terms of a step's reward are the change
of every potential and the costs, all times one scale; the reward is their sum. This is potential-based
shaping (Ng, Harada & Russell 1999) with potentials of the whole state and no discount: over an episode
the terms telescope to the difference between its end and its beginning.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline import DEFAULT_GAMMA, EpochFacts, LifecycleOp, SlotTable

FamilyName = Literal["paired", "contribution", "loss", "log_loss", "sparse"]
Array = NDArray[np.float64]
RewardTerms = dict[str, Array]
"""The terms of one step by name, each ``[env]``; the reward is their sum."""

LEAST_LOSS: Final = 1e-3
"""What is below counts as this: no logarithm is without end."""
CHURN_COST: Final = 0.01
"""Of removing a seed: what one point of score is worth."""
ROLLBACK_PENALTY: Final = 0.2
"""Of an episode that broke down, besides all that it had gained: what twenty points of score are worth."""


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

# --- terms, each [env]: potentials are what a state is worth, 1 for 100 points -------------------------


def lead(s: RewardInputs) -> Array:
    """What growth has gained so far: the lead over the do-nothing twin."""
    return (s.facts.val_score - s.twin_score) / 100.0


def contribution(s: RewardInputs) -> Array:
    """What was measured of the seeds that take part; what was never measured (NaN) does not count yet."""
    measured = s.table.in_forward & ~np.isnan(s.table.contribution)
    return np.where(measured, s.table.contribution, 0.0).sum(axis=1) / 100.0


def loss(s: RewardInputs) -> Array:
    """Falls with the loss, by 1 from a blind guess to none: improvement is positive."""
    return -s.facts.val_loss / s.guess_loss


def log_loss(s: RewardInputs) -> Array:
    """Rises by 0.1 whenever the loss falls by a tenth, wherever it stands; a blind guess is worth 0.

    The lead over a twin in it is log(twin's loss / loss): the twin is a constant of the episode, so a
    policy that learns from this learns the paired score without a twin being run.
    """
    return -np.log(np.maximum(s.facts.val_loss, LEAST_LOSS) / s.guess_loss)


def final_score(s: RewardInputs) -> Array:
    """The score of a finished episode; an episode in progress is worth nothing yet."""
    return np.where(s.facts.ended, s.facts.val_score / 100.0, 0.0)


def rent(s: RewardInputs) -> Array:
    """What the grown parameters cost, never positive."""
    return rent_potential(s.facts.grown_params.astype(np.float64), s.rent)


def rent_potential(grown_params: Array | float, price: Array | float) -> Array:
    """Minus ``price`` per thousand parameters."""
    return -np.asarray(price) * grown_params / 1000.0


def final_rent(s: RewardInputs) -> Array:
    return np.where(s.facts.ended, rent(s), 0.0)


def churn(s: RewardInputs) -> Array:
    """What a removal costs in the step that orders it."""
    return np.where((s.facts.last_op == LifecycleOp.PRUNE) & s.facts.last_success, -CHURN_COST, 0.0)


# --- families ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RewardFamily:
    """A definition of reward."""

    potentials: Mapping[str, Term]
    costs: Mapping[str, Term] = field(default_factory=dict)
    needs_twin: bool = False
    gamma: float = DEFAULT_GAMMA
    """Discount unless a configuration says otherwise."""


FAMILIES: Final[Mapping[FamilyName, RewardFamily]] = {
    "paired": RewardFamily({"lead": lead, "rent": rent}, needs_twin=True, gamma=1.0),
    "contribution": RewardFamily({"contribution": contribution, "rent": rent}, costs={"churn": churn}),
    "loss": RewardFamily({"loss": loss, "rent": rent}),
    "log_loss": RewardFamily({"log_loss": log_loss, "rent": rent}, gamma=1.0),
    "sparse": RewardFamily({"score": final_score, "rent": final_rent}, gamma=1.0),
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
        rewards["rollback"] = self._scale * np.where(broken, -ROLLBACK_PENALTY, 0.0)
        return rewards

    def _potentials(self, inputs: RewardInputs) -> dict[str, Array]:
        return {name: term(inputs) for name, term in self._family.potentials.items()}


def total(rewards: RewardTerms) -> Array:
    """The reward ``[env]``."""
    return np.sum(list(rewards.values()), axis=0)
