"""The real environments as a policy meets them: observation, masks and paired reward around a vector.

The reward telescopes: with P_t = lead over the twin − rent, a step pays scale · (P_t − P_{t−1}), so
an undiscounted return is the final paired score of the committed network.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from esper.leyline import EpochFacts
from esper.simic.rewards.terms import paired_potential, rent_potential
from esper.simic.training.rollout import Observation, Step
from esper.tamiyo.policy.action_masks import compute_batch_masks
from esper.tamiyo.policy.features import batch_obs_to_features
from esper.tamiyo.tracker import SignalTracker
from esper.tolaria.env import LifeReport
from esper.tolaria.tasks.spec import TaskSpec
from esper.tolaria.twin import twin_scores
from esper.tolaria.vector import SerialVector


class GrowthEnv:
    """A vector of host lives; every reset begins the next episode of each environment."""

    def __init__(
        self,
        task: TaskSpec,
        *,
        rng_seed: int,
        env_indices: Sequence[int],
        rent: float = 0.01,
        scale: float = 5.0,
    ) -> None:
        self._task = task
        self._rng_seed = rng_seed
        self._indices = tuple(env_indices)
        self._vector = SerialVector(task, rng_seed=rng_seed, env_indices=self._indices)
        self._tracker = SignalTracker(len(self._indices))
        self._rent, self._scale = rent, scale
        self._episode = -1
        self.reports: list[LifeReport] = []
        """Of the lives that ended last."""

    @property
    def env_indices(self) -> Sequence[int]:
        return self._indices

    @property
    def horizon(self) -> int:
        return self._task.horizon

    def begin(self, episode: int) -> Observation:
        """Begin life ``episode`` everywhere."""
        self._episode = episode
        self._twins = np.array([self._twin_scores(env) for env in self._indices])
        facts = self._vector.reset(episode)
        self._tracker.reset()
        self._potential = np.zeros(len(self._indices))
        return self._observe(facts)

    def reset(self) -> Observation:
        return self.begin(self._episode + 1)

    def seek(self, episode: int) -> None:
        """Let the next reset begin life ``episode``."""
        self._episode = episode - 1

    def _twin_scores(self, env: int) -> Sequence[float]:
        return twin_scores(self._task, rng_seed=self._rng_seed, env=env, episode=self._episode)

    def step(self, actions: NDArray[np.int64]) -> Step:
        facts = self._vector.step(actions)
        reward = self._reward(facts)
        if facts.ended.all():
            self.reports = self._vector.finish()
        return Step(self._observe(facts), reward, facts.ended)

    def _observe(self, facts: EpochFacts) -> Observation:
        signals = self._tracker.update(facts)
        space = self._vector.action_space
        features, blueprints = batch_obs_to_features(signals, self._vector.table, space.slot_config)
        return Observation(features, blueprints, compute_batch_masks(self._vector.table, space))

    def _reward(self, facts: EpochFacts) -> NDArray[np.float64]:
        twin = self._twins[np.arange(len(self._indices)), facts.epoch]
        potential = paired_potential(facts.val_score, twin)
        potential = potential + rent_potential(facts.grown_params.astype(np.float64), self._rent)
        reward = self._scale * (potential - self._potential)
        self._potential = potential
        return reward
