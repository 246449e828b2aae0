"""Log of reward terms over a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from esper.leyline.protocols import Reward
from esper.simic.rewards.families import Array, RewardTerms, total


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
    def join(cls, parts: Sequence[RewardLog]) -> RewardLog:
        """Concatenate the reward logs of several shards along the environment axis."""
        terms = [
            {name: np.concatenate([terms[name] for terms in step]) for name in step[0]}
            for step in zip(*(part.terms for part in parts), strict=True)
        ]
        unpaired = [np.concatenate(step) for step in zip(*(part.unpaired for part in parts), strict=True)]
        return cls(terms, unpaired, sum(part.broken_episodes for part in parts))
