"""The rewards of a vector of episodes over a rollout, term by term."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from esper.kasmina.recorder import Reward
from esper.simic.rewards.families import Array, RewardTerms, total


@dataclass(slots=True)
class RewardLog:
    """The reward terms of a rollout, and what its rewards would have been without the twin."""

    terms: list[RewardTerms] = field(default_factory=list)
    """One per step."""
    unpaired: list[Array] = field(default_factory=list)
    """One per step where the family compares with a twin, else none."""
    broken_episodes: int = 0

    def reward(self, env: int, steps: slice) -> Reward:
        """What one environment got over ``steps``, and its terms."""
        sums = {
            name: float(np.sum([terms[name][env] for terms in self.terms[steps]])) for name in self.terms[0]
        }
        return Reward(sum(sums.values()), sums)

    def mean_terms(self) -> dict[str, float]:
        """By term, mean over the environments of its sum over the steps."""
        names = self.terms[0].keys()
        return {name: float(np.sum([terms[name] for terms in self.terms], axis=0).mean()) for name in names}

    def variance(self) -> float:
        """Of the rewards over all steps and environments."""
        return float(np.var([total(terms) for terms in self.terms]))

    def variance_unpaired(self) -> float | None:
        """The same without the twin; ``None`` where there is none anyway."""
        return float(np.var(self.unpaired)) if self.unpaired else None

    @classmethod
    def join(cls, parts: Sequence[RewardLog]) -> RewardLog:
        """The log of the environments of all ``parts``, in their order."""
        terms = [
            {name: np.concatenate([terms[name] for terms in step]) for name in step[0]}
            for step in zip(*(part.terms for part in parts), strict=True)
        ]
        unpaired = [np.concatenate(step) for step in zip(*(part.unpaired for part in parts), strict=True)]
        return cls(terms, unpaired, sum(part.broken_episodes for part in parts))
