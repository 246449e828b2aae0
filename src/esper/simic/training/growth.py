"""The real environments as a policy meets them: observation, masks and reward around a vector of episodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from esper.leyline import EpochFacts
from esper.simic.rewards.families import FAMILIES, FamilyName, RewardFunction, Standing, total
from esper.simic.rewards.reward_log import RewardLog
from esper.simic.training.recorder import EpisodeRecorder
from esper.simic.training.rollout import Step
from esper.tamiyo.policy.observer import Observation, Observer
from esper.tolaria.env import EpisodeReport
from esper.tolaria.tasks.spec import TaskSpec
from esper.tolaria.twin import twin_scores
from esper.tolaria.vector import SerialVector


class GrowthEnv:
    """A vector of episodes; every reset begins the next episode of each environment.

    An episode that breaks down is followed at once by a fresh one with its own twin. An episode that reaches
    its horizon is the last of its environment until the next reset.
    """

    def __init__(
        self,
        task: TaskSpec,
        *,
        rng_seed: int,
        env_indices: Sequence[int],
        family: FamilyName = "paired",
        rent: float = 0.01,
        scale: float = 5.0,
        horizon_terminates: bool = True,
        capacity: int | None = None,
    ) -> None:
        """``capacity`` is the number of slots that the policy has room for, the host's unless given."""
        self._task = task
        self._rng_seed = rng_seed
        self._indices = tuple(env_indices)
        # A policy learns most from the decision that broke a host if nothing is undone behind its back.
        self._vector = SerialVector(task, rng_seed=rng_seed, env_indices=self._indices, rollback_limit=1)
        self.recorders = [EpisodeRecorder() for _ in self._indices]
        """The rows of each environment since the last reset."""
        for env, recorder in zip(self._vector.envs, self.recorders, strict=True):
            env.sink = recorder
        self._observer = Observer(len(self._indices), task.num_slots, capacity or task.num_slots)
        self._family = FAMILIES[family]
        self._reward_function = RewardFunction(self._family, scale)
        self._unpaired = RewardFunction(self._family, scale)
        """Pays as if the twin stood at zero throughout, to show what it is good for."""
        self._rent = rent
        self._horizon_terminates = horizon_terminates
        self._episode = -1
        self.reports: list[EpisodeReport] = []
        """Of the episodes that reached their horizon since the last reset."""
        self.reward_log = RewardLog()
        """Of the steps since the last reset."""

    @property
    def env_indices(self) -> Sequence[int]:
        return self._indices

    @property
    def horizon(self) -> int:
        return self._task.horizon

    def begin(self, episode: int) -> Observation:
        """Begin episode ``episode`` everywhere."""
        self._episode = episode
        self._twins = np.array([self._twin_scores(row) for row in range(len(self._indices))])
        for env in self._vector.envs:
            env.iteration = episode + 1
        for recorder in self.recorders:
            recorder.begin()
        facts = self._vector.reset(episode)
        self._observer.reset()
        self._reward_function.begin(self._standing(facts))
        self._unpaired.begin(self._without_twin(facts))
        self.reports, self.reward_log = [], RewardLog()
        return self._observe(facts)

    def reset(self) -> Observation:
        return self.begin(self._episode + 1)

    def seek(self, episode: int) -> None:
        """Let the next reset begin episode ``episode``."""
        self._episode = episode - 1

    def step(self, actions: NDArray[np.int64]) -> Step:
        facts = self._vector.step(actions)
        reward = self._judge(facts)
        ended, broken = facts.ended, facts.rolled_back
        for row in np.flatnonzero(ended):
            report = self._vector.envs[row].finish()
            if broken[row]:
                facts = self._begin_again(int(row), facts)
            else:
                self.reports.append(report)
        terminated = ended if self._horizon_terminates else broken
        return Step(self._observe(facts), reward, ended, terminated)

    def _judge(self, facts: EpochFacts) -> NDArray[np.float64]:
        ledger = self._reward_function.judge(self._standing(facts))
        self.reward_log.ledgers.append(ledger)
        if self._family.needs_twin:
            self.reward_log.unpaired.append(total(self._unpaired.judge(self._without_twin(facts))))
        self.reward_log.broken_episodes += int(facts.rolled_back.sum())
        return total(ledger)

    def _begin_again(self, row: int, facts: EpochFacts) -> EpochFacts:
        """A fresh episode in one environment; the facts of all, with its own exchanged."""
        env = self._vector.envs[row]
        attempt = env.attempt + 1
        self._twins[row] = self._twin_scores(row, attempt)
        facts = facts.replaced(row, env.reset(env.episode, attempt))
        self._reward_function.begin_again(row, self._standing(facts))
        self._unpaired.begin_again(row, self._without_twin(facts))
        return facts

    def _twin_scores(self, row: int, attempt: int = 0) -> Sequence[float]:
        if not self._family.needs_twin:
            return [np.nan] * (self.horizon + 1)
        scores = twin_scores(
            self._task,
            rng_seed=self._rng_seed,
            env=self._indices[row],
            episode=self._episode,
            attempt=attempt,
        )
        self._vector.envs[row].twin_scores = scores
        return scores

    def _standing(self, facts: EpochFacts) -> Standing:
        twin = self._twins[np.arange(len(self._indices)), facts.epoch]
        drawn = [env.instance.rent for env in self._vector.envs]
        rent = np.array([self._rent if own is None else own for own in drawn])
        guess_loss = np.array([env.guess_loss for env in self._vector.envs])
        return Standing(facts, self._vector.table, twin, guess_loss, rent)

    def _without_twin(self, facts: EpochFacts) -> Standing:
        return self._standing(facts)._replace(twin_score=np.zeros(len(self._indices)))

    def _observe(self, facts: EpochFacts) -> Observation:
        return self._observer.observe(facts, self._vector.table, self._vector.action_space)
