"""What a vector of episodes was paid over a rollout, term by term."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from esper.simic.rewards.families import Ledger, total
from esper.simic.rewards.terms import Array


@dataclass(slots=True)
class RewardLog:
    """The ledgers of a rollout, and what its rewards would have been without the twin."""

    ledgers: list[Ledger] = field(default_factory=list)
    """One per step."""
    unpaired: list[Array] = field(default_factory=list)
    """One per step where the family compares with a twin, else none."""
    broken_episodes: int = 0

    def paid(self) -> dict[str, float]:
        """By term, mean over the environments of its sum over the steps."""
        names = self.ledgers[0].keys()
        return {
            name: float(np.sum([ledger[name] for ledger in self.ledgers], axis=0).mean()) for name in names
        }

    def variance(self) -> float:
        """Of the rewards over all steps and environments."""
        return float(np.var([total(ledger) for ledger in self.ledgers]))

    def variance_unpaired(self) -> float | None:
        """The same without the twin; ``None`` where there is none anyway."""
        return float(np.var(self.unpaired)) if self.unpaired else None

    @classmethod
    def join(cls, parts: Sequence[RewardLog]) -> RewardLog:
        """The reward_log of the environments of all ``parts``, in their order."""
        ledgers = [
            {name: np.concatenate([ledger[name] for ledger in step]) for name in step[0]}
            for step in zip(*(part.ledgers for part in parts), strict=True)
        ]
        unpaired = [np.concatenate(step) for step in zip(*(part.unpaired for part in parts), strict=True)]
        return cls(ledgers, unpaired, sum(part.broken_episodes for part in parts))
