"""Reward families, and a log of rewards.

A reward is the sum of changes of named potentials Φ_i and of named costs c_j.

The reward of step t is r_t = scale · (Σ_i (Φ_i(s_t) − Φ_i(s_{t−1})) + Σ_j c_j(s_t)).

The reward is potential-based shaping (Ng, Harada & Russell 1999) without discount: over an episode the
potential terms telescope to Φ(end) − Φ(start).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from esper.leyline import DEFAULT_GAMMA, EpochFacts, LifecycleOp, Reward, SlotTable

FamilyName = Literal["paired", "contribution", "loss", "log_loss", "sparse"]
Array = NDArray[np.float64]
RewardTerms = dict[str, Array]
"""Reward terms of one step by name, each ``[env]``; the sum of the terms is the reward."""

LEAST_LOSS: Final = 1e-3
"""Lower bound of the loss in the potential ``log_loss``, so that its logarithm is finite."""
CHURN_COST: Final = 0.01
"""Amount by which a successful prune lowers the reward, equal to one point of score."""
ROLLBACK_PENALTY: Final = 0.2
"""Penalty of an episode whose host diverged, equal to twenty points of score."""


class RewardInputs(NamedTuple):
    """Measurements of all environments after an epoch, from which the rewards are computed."""

    facts: EpochFacts
    table: SlotTable
    twin_score: Array
    """Validation score of the do-nothing twin at the same epoch; NaN for families without a twin."""
    guess_loss: Array | float
    """Loss of a constant prediction (class frequencies or mean target) on the data of each episode."""
    rent: Array | float
    """Amount by which 1,000 grown parameters lower the reward."""


Term = Callable[[RewardInputs], Array]

# --- terms, each [env]; potentials are in units of 100 points of score --------------------------------


def lead(s: RewardInputs) -> Array:
    """Return (validation score − score of the do-nothing twin) / 100."""
    return (s.facts.val_score - s.twin_score) / 100.0


def contribution(s: RewardInputs) -> Array:
    """Return the sum of measured contributions of the seeds in the forward pass, divided by 100."""
    measured = s.table.in_forward & ~np.isnan(s.table.contribution)
    return np.where(measured, s.table.contribution, 0.0).sum(axis=1) / 100.0


def loss(s: RewardInputs) -> Array:
    """Return −(validation loss / loss of a constant prediction), which is 0 for a perfect prediction."""
    return -s.facts.val_loss / s.guess_loss


def log_loss(s: RewardInputs) -> Array:
    """Return −ln(validation loss / loss of a constant prediction), which is 0 for a constant prediction.

    At the end of an episode, the log-loss potential differs from ln(loss of the do-nothing twin / loss) by a
    number that no action changes. Rewards from the log-loss potential and rewards from a comparison with the
    twin therefore have the same optimal policy, but the log-loss potential needs no compute for a twin.
    """
    return -np.log(np.maximum(s.facts.val_loss, LEAST_LOSS) / s.guess_loss)


def final_score(s: RewardInputs) -> Array:
    """Return validation score / 100 at the end of an episode, 0 at earlier steps."""
    return np.where(s.facts.ended, s.facts.val_score / 100.0, 0.0)


def rent(s: RewardInputs) -> Array:
    """Return the rent potential of each network's grown parameters, which is never positive."""
    return rent_potential(s.facts.grown_params.astype(np.float64), s.rent)


def rent_potential(grown_params: Array | float, price: Array | float) -> Array:
    """Return the rent potential −price · grown_params / 1000, with a price per 1,000 parameters."""
    return -np.asarray(price) * grown_params / 1000.0


def final_rent(s: RewardInputs) -> Array:
    return np.where(s.facts.ended, rent(s), 0.0)


def churn(s: RewardInputs) -> Array:
    """Return the cost of a prune: −CHURN_COST in a step with a successful PRUNE, else 0."""
    return np.where((s.facts.last_op == LifecycleOp.PRUNE) & s.facts.last_success, -CHURN_COST, 0.0)


# --- families -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RewardFamily:
    """Definition of a reward family by its potentials, costs and discount factor."""

    potentials: Mapping[str, Term]
    costs: Mapping[str, Term] = field(default_factory=dict)
    needs_twin: bool = False
    gamma: float = DEFAULT_GAMMA
    """Default discount factor for policies trained with this reward family."""


FAMILIES: Final[Mapping[FamilyName, RewardFamily]] = {
    "paired": RewardFamily({"lead": lead, "rent": rent}, needs_twin=True, gamma=1.0),
    "contribution": RewardFamily({"contribution": contribution, "rent": rent}, costs={"churn": churn}),
    "loss": RewardFamily({"loss": loss, "rent": rent}),
    "log_loss": RewardFamily({"log_loss": log_loss, "rent": rent}, gamma=1.0),
    "sparse": RewardFamily({"score": final_score, "rent": final_rent}, gamma=1.0),
}


class RewardFunction:
    """Computes the rewards of all environments under one reward family."""

    def __init__(self, family: RewardFamily, scale: float) -> None:
        self._family = family
        self._scale = scale

    def begin(self, inputs: RewardInputs) -> None:
        """Store the start potentials of all episodes, given the reward inputs of the untrained hosts."""
        self._at_birth = self._potentials(inputs)
        self._last = {name: value.copy() for name, value in self._at_birth.items()}

    def begin_again(self, env: int, inputs: RewardInputs) -> None:
        """Store the start potentials of a new attempt in ``env``, given all environments' reward inputs."""
        for name, value in self._potentials(inputs).items():
            self._at_birth[name][env] = self._last[name][env] = value[env]

    def reward_terms(self, inputs: RewardInputs) -> RewardTerms:
        """Return the reward terms of the last epoch by name, each ``[env]``.

        In environments whose host diverged, the potentials return to their values at the start of the
        attempt, and the rollback penalty is added.
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
    """Return the reward ``[env]`` as the sum of its terms."""
    return np.sum(list(rewards.values()), axis=0)


@dataclass(slots=True)
class RewardLog:
    """Reward terms of a rollout, and rewards computed with a twin score of 0 for comparison."""

    terms: list[RewardTerms] = field(default_factory=list)
    """Reward terms by name, one entry per step of the rollout."""
    unpaired: list[Array] = field(default_factory=list)
    """Rewards ``[env]`` with a twin score of 0, one array per step; empty for families without a twin."""
    broken_episodes: int = 0

    def reward(self, env: int, steps: slice) -> Reward:
        """Return the sum of rewards of one environment over ``steps``, in total and for each reward term."""
        sums = {
            name: float(np.sum([terms[name][env] for terms in self.terms[steps]])) for name in self.terms[0]
        }
        return Reward(sum(sums.values()), sums)

    def mean_terms(self) -> dict[str, float]:
        """Return each reward term summed over the steps of the rollout, as a mean over environments."""
        names = self.terms[0].keys()
        return {name: float(np.sum([terms[name] for terms in self.terms], axis=0).mean()) for name in names}

    def variance(self) -> float:
        """Return the variance of rewards over all steps and environments."""
        return float(np.var([total(terms) for terms in self.terms]))

    def variance_unpaired(self) -> float | None:
        """Return the variance of rewards with a twin score of 0; ``None`` for families without a twin."""
        return float(np.var(self.unpaired)) if self.unpaired else None

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Concatenate the reward logs of several shards along the environment axis."""
        terms = [
            {name: np.concatenate([terms[name] for terms in step]) for name in step[0]}
            for step in zip(*(part.terms for part in parts), strict=True)
        ]
        unpaired = [np.concatenate(step) for step in zip(*(part.unpaired for part in parts), strict=True)]
        return cls(terms, unpaired, sum(part.broken_episodes for part in parts))
