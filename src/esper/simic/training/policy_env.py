"""Episodes of growing networks as a policy meets them: observation, masks and reward around a vector."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from esper.leyline import EpochFacts
from esper.leyline.protocols import PolicyOutput
from esper.leyline.rows import Row
from esper.simic.rewards.families import FAMILIES, RewardFunction, RewardInputs, total
from esper.simic.rewards.reward_log import RewardLog
from esper.simic.training_config import TrainingConfig
from esper.tamiyo.policy.observer import Observation, Observer
from esper.tolaria.episode_report import EpisodeReport
from esper.tolaria.tasks.spec import TaskSpec
from esper.tolaria.twin import twin_scores
from esper.tolaria.vector import SerialVector


class PolicyStep(NamedTuple):
    """What a decision came to, arrays ``[env]``, and what is seen next.

    Where an episode terminated, it is worth nothing beyond its end, and ``observation`` belongs to the
    next one if the environment goes on. One that ended without terminating was cut off, which is
    possible at the last step of a rollout; ``observation`` is still its own.
    """

    observation: Observation
    reward: NDArray[np.float64]
    ended: NDArray[np.bool_]
    terminated: NDArray[np.bool_]


class PolicyEnv(Protocol):
    """Environments as a policy meets them."""

    @property
    def env_indices(self) -> Sequence[int]:
        """Names of the environments within the run, for their random streams."""

    @property
    def horizon(self) -> int:
        """Steps of one episode."""

    def reset(self) -> Observation:
        """Begin a new episode everywhere."""

    def step(self, actions: NDArray[np.int64], outputs: Sequence[PolicyOutput] | None = None) -> PolicyStep:
        """Carry out ``actions [env, 8]``; ``outputs`` are recorded with them where decisions are recorded."""


class RowJournal(Protocol):
    """Where each process puts the rows of its own environments, epoch by epoch, while an iteration runs."""

    def take(self, iteration: int, env: int, rows: Sequence[Row]) -> None:
        """The rows of one epoch of the shard whose first environment is ``env``."""


class RowList:
    """The sink of one environment: its rows since the last reset, of which some were taken already."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._taken = 0

    def emit(self, row: Row) -> None:
        self.rows.append(row)

    def take_new(self) -> list[Row]:
        """The rows since the last call."""
        new, self._taken = self.rows[self._taken :], len(self.rows)
        return new


class GrowthEnv:
    """A vector of episodes; every reset begins the next episode of each environment.

    An episode that breaks down is followed at once by another attempt with its own twin. One that reaches
    its horizon is the last of its environment until the next reset.
    """

    def __init__(
        self,
        task: TaskSpec,
        config: TrainingConfig,
        *,
        rng_seed: int,
        env_indices: Sequence[int],
        journal: RowJournal | None = None,
    ) -> None:
        self._task = task
        self._config = config
        self._rng_seed = rng_seed
        self._journal = journal
        self.env_indices = tuple(env_indices)
        self.horizon = task.horizon
        self.next_episode = 0
        """The one that the next reset begins."""
        # A policy learns most from the decision that broke a host if nothing is undone behind its back.
        self._vector = SerialVector(
            task,
            rng_seed=rng_seed,
            env_indices=self.env_indices,
            rollback_limit=1,
            devices=config.devices,
            amp=config.amp,
        )
        capacity = config.capacity or task.num_slots
        self._observer = Observer(len(env_indices), task.num_slots, capacity, context=config.context)
        self._family = FAMILIES[config.reward_family]
        self._reward_function = RewardFunction(self._family, config.reward_scale)
        self._unpaired = RewardFunction(self._family, config.reward_scale)
        """Rewards as if the twin scored zero throughout, to show what the twin is good for."""

    def reset(self) -> Observation:
        self._episode, self.next_episode = self.next_episode, self.next_episode + 1
        self._attempts = [0] * len(self.env_indices)
        self._born = [0] * len(self.env_indices)
        """The step at which each environment's present attempt began."""
        self._twins = np.full((len(self.env_indices), self.horizon + 1), np.nan)
        self._sinks = [RowList() for _ in self.env_indices]
        self.reports: list[EpisodeReport] = []
        """Of the episodes that reached their horizon since the last reset."""
        self.reward_log = RewardLog()
        """Of the steps since the last reset."""
        for env, sink in zip(self._vector.envs, self._sinks, strict=True):
            env.sink = sink
        for row in range(len(self.env_indices)):
            self._reset_env(row)
        facts = self._vector.facts
        self._observer.reset()
        inputs = self._reward_inputs(facts)
        self._reward_function.begin(inputs)
        self._unpaired.begin(self._without_twin(inputs))
        return self._observe(facts)

    @property
    def rows(self) -> list[Row]:
        """Of the episodes since the last reset, one environment after the other."""
        return [row for sink in self._sinks for row in sink.rows]

    def step(self, actions: NDArray[np.int64], outputs: Sequence[PolicyOutput] | None = None) -> PolicyStep:
        facts = self._vector.step(actions)
        rewards = self._rewards(facts)
        for row, env in enumerate(self._vector.envs):
            output = None if outputs is None else outputs[row]
            env.record_decision(output, self.reward_log.reward(row, slice(-1, None)))
        ended, broken = facts.ended, facts.rolled_back
        for row in np.flatnonzero(ended).tolist():
            report = self._vector.envs[row].finish(self.reward_log.reward(row, slice(self._born[row], None)))
            if broken[row]:
                self._begin_attempt(row)
            else:
                self.reports.append(report)
        if self._journal is not None:
            new = [row for sink in self._sinks for row in sink.take_new()]
            self._journal.take(self._episode + 1, self.env_indices[0], new)
        terminated = ended if self._config.horizon_terminates else broken
        return PolicyStep(self._observe(self._vector.facts), rewards, ended, terminated)

    def _rewards(self, facts: EpochFacts) -> NDArray[np.float64]:
        """The rewards ``[env]`` of the epoch that just ended, entered in the log."""
        inputs = self._reward_inputs(facts)
        terms = self._reward_function.reward_terms(inputs)
        self.reward_log.terms.append(terms)
        if self._family.needs_twin:
            unpaired = self._unpaired.reward_terms(self._without_twin(inputs))
            self.reward_log.unpaired.append(total(unpaired))
        self.reward_log.broken_episodes += int(facts.rolled_back.sum())
        return total(terms)

    def _begin_attempt(self, row: int) -> None:
        """Another attempt at the episode in one environment."""
        self._attempts[row] += 1
        self._born[row] = len(self.reward_log.terms)
        self._reset_env(row)
        inputs = self._reward_inputs(self._vector.facts)
        self._reward_function.begin_again(row, inputs)
        self._unpaired.begin_again(row, self._without_twin(inputs))

    def _reset_env(self, row: int) -> None:
        episode, attempt = self._episode, self._attempts[row]
        env, scores = self.env_indices[row], None
        if self._family.needs_twin:
            where = {"env": env, "episode": episode, "attempt": attempt}
            compute = self._vector.envs[row].compute
            scores = twin_scores(self._task, rng_seed=self._rng_seed, compute=compute, **where)
            self._twins[row] = scores
        place = {"attempt": attempt, "iteration": episode + 1}
        self._vector.reset_env(row, episode, **place, twin_scores=scores)

    def _reward_inputs(self, facts: EpochFacts) -> RewardInputs:
        hosts = [env.host for env in self._vector.envs]
        rents = [self._config.rent if host.instance.rent is None else host.instance.rent for host in hosts]
        return RewardInputs(
            facts=facts,
            table=self._vector.table,
            twin_score=self._twins[np.arange(len(hosts)), facts.epoch],
            guess_loss=np.array([host.guess_loss for host in hosts]),
            rent=np.array(rents),
        )

    def _without_twin(self, inputs: RewardInputs) -> RewardInputs:
        return inputs._replace(twin_score=np.zeros(len(self.env_indices)))

    def _observe(self, facts: EpochFacts) -> Observation:
        return self._observer.observe(facts, self._vector.table, self._vector.action_space)
