"""Environments in which a policy is trained: their interface, and ``GrowthEnv`` for growing networks.

``GrowthEnv`` adds observations, masks and rewards to a ``SerialVector`` of growing networks.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from esper.leyline import EpochFacts, PolicyOutput, Row
from esper.simic.config import TrainingConfig
from esper.simic.rewards.families import FAMILIES, RewardFunction, RewardInputs, RewardLog, total
from esper.tamiyo.policy.features import Observation, Observer
from esper.tolaria.env import EpisodeReport
from esper.tolaria.tasks.spec import TaskSpec
from esper.tolaria.twin import TwinOf, twin_scores
from esper.tolaria.vector import SerialVector


class PolicyStep(NamedTuple):
    """Result of a step: for every environment the next observation, the reward, and whether its episode
    ended.

    After a termination the value of the next state is 0, and ``observation`` is the first observation of the
    next episode, if any. ``ended`` without ``terminated`` is a truncation, which is possible only in the last
    step of a rollout; ``observation`` is then the last observation of the truncated episode.
    """

    observation: Observation
    reward: NDArray[np.float64]
    ended: NDArray[np.bool_]
    terminated: NDArray[np.bool_]


class PolicyEnv(Protocol):
    """Interface of a vector of environments in which rollouts are collected."""

    @property
    def env_indices(self) -> Sequence[int]:
        """Indices of the environments within the run, for their random streams."""

    @property
    def horizon(self) -> int:
        """Number of steps of one episode."""

    def reset(self) -> Observation:
        """Start a new episode in every environment."""

    def step(self, actions: NDArray[np.int64], outputs: Sequence[PolicyOutput] | None = None) -> PolicyStep:
        """Apply ``actions [env, head]``; the policy's ``outputs`` are written into the decision rows."""


class RowJournal(Protocol):
    """Receiver of the telemetry rows of an iteration in progress, epoch by epoch."""

    def take(self, iteration: int, env: int, rows: Sequence[Row]) -> None:
        """Receive the telemetry rows of one epoch of environments, the first of which is ``env``."""


class RowList(list[Row]):
    """Event sink of one environment that stores its telemetry rows since the last reset."""

    _taken = 0

    def emit(self, row: Row) -> None:
        self.append(row)

    def take_new(self) -> list[Row]:
        """Return the telemetry rows added since the last call of ``take_new``."""
        new, self._taken = self[self._taken :], len(self)
        return new


class GrowthEnv:
    """Vector of environments with growing networks and rewards; a reset starts the next episode of each.

    When a host diverges, a new attempt at the same episode starts at once, with its own twin. An environment
    that reached its horizon waits for the next reset.

    Args:
        task: Task of all environments.
        config: Configuration of the policy training, with settings of reward, observation and hardware.
        rng_seed: Root of the random streams.
        env_indices: Indices of the environments within the run.
        journal: Receiver of the telemetry rows of each epoch, if any.
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
        """Number of the episode that the next reset starts."""
        # One rollback ends the attempt, so that the policy learns from the action that made the host diverge.
        self.vector = SerialVector(
            task,
            rng_seed=rng_seed,
            env_indices=self.env_indices,
            rollback_limit=1,
            devices=config.devices,
            amp=config.amp,
        )
        """Environments with the growing networks, one network per environment."""
        capacity = config.capacity or task.num_slots
        self._observer = Observer(len(env_indices), task.num_slots, capacity, context=config.context)
        self._family = FAMILIES[config.reward_family]
        self._reward_function = RewardFunction(self._family, config.reward_scale)
        self._unpaired = RewardFunction(self._family, config.reward_scale)
        """Reward function with a twin score of 0, to report how much reward variance the twin removes."""

    def reset(self) -> Observation:
        self._episode, self.next_episode = self.next_episode, self.next_episode + 1
        self._attempts = [0] * len(self.env_indices)
        self._born = [0] * len(self.env_indices)
        """First step of the present attempt at an episode, per environment."""
        self._twins = np.full((len(self.env_indices), self.horizon + 1), np.nan)
        self._sinks = [RowList() for _ in self.env_indices]
        self.reports: list[EpisodeReport] = []
        """Reports of the episodes that reached their horizon since the last reset."""
        self.reward_log = RewardLog()
        """Reward terms of all steps since the last reset."""
        for env, sink in zip(self.vector.envs, self._sinks, strict=True):
            env.recorder.sink = sink
        self._reset_envs(range(len(self.env_indices)))
        facts = self.vector.facts
        self._observer.reset()
        inputs = self._reward_inputs(facts)
        self._reward_function.begin(inputs)
        self._unpaired.begin(self._without_twin(inputs))
        return self._observe(facts)

    @property
    def rows(self) -> list[Row]:
        """Telemetry rows since the last reset, one environment after another."""
        return [row for sink in self._sinks for row in sink]

    def step(self, actions: NDArray[np.int64], outputs: Sequence[PolicyOutput] | None = None) -> PolicyStep:
        facts = self.vector.step(actions)
        rewards = self._rewards(facts)
        for row, env in enumerate(self.vector.envs):
            output = None if outputs is None else outputs[row]
            env.recorder.emit_last_action(output, self.reward_log.reward(row, slice(-1, None)))
        ended, broken = facts.ended, facts.rolled_back
        for row in np.flatnonzero(ended).tolist():
            report = self.vector.envs[row].finish(self.reward_log.reward(row, slice(self._born[row], None)))
            if broken[row]:
                self._begin_attempt(row)
            else:
                self.reports.append(report)
        if self._journal is not None:
            new = [row for sink in self._sinks for row in sink.take_new()]
            self._journal.take(self._episode + 1, self.env_indices[0], new)
        terminated = ended if self._config.horizon_terminates else broken
        return PolicyStep(self._observe(self.vector.facts), rewards, ended, terminated)

    def _rewards(self, facts: EpochFacts) -> NDArray[np.float64]:
        """Return the rewards ``[env]`` of the last epoch and append their terms to the reward log."""
        inputs = self._reward_inputs(facts)
        terms = self._reward_function.reward_terms(inputs)
        self.reward_log.terms.append(terms)
        if self._family.needs_twin:
            unpaired = self._unpaired.reward_terms(self._without_twin(inputs))
            self.reward_log.unpaired.append(total(unpaired))
        self.reward_log.broken_episodes += int(facts.rolled_back.sum())
        return total(terms)

    def _begin_attempt(self, row: int) -> None:
        """Start another attempt at the present episode in one environment, after its host diverged."""
        self._attempts[row] += 1
        self._born[row] = len(self.reward_log.terms)
        self._reset_envs([row])
        inputs = self._reward_inputs(self.vector.facts)
        self._reward_function.begin_again(row, inputs)
        self._unpaired.begin_again(row, self._without_twin(inputs))

    def _reset_envs(self, rows: Sequence[int]) -> None:
        """Start the present attempt at an episode in the environments ``rows``; twins train together."""
        attempts = [
            TwinOf(self.env_indices[row], self._episode, self._attempts[row], self.vector.envs[row].compute)
            for row in rows
        ]
        scores: Sequence[list[float] | None] = [None] * len(rows)
        if self._family.needs_twin:
            scores = twin_scores(self._task, attempts, rng_seed=self._rng_seed)
            self._twins[list(rows)] = scores
        for row, of, twin in zip(rows, attempts, scores, strict=True):
            self.vector.reset_env(
                row, of.episode, attempt=of.attempt, iteration=of.episode + 1, twin_scores=twin
            )

    def _reward_inputs(self, facts: EpochFacts) -> RewardInputs:
        hosts = [env.host for env in self.vector.envs]
        rents = [self._config.rent if host.instance.rent is None else host.instance.rent for host in hosts]
        return RewardInputs(
            facts=facts,
            table=self.vector.table,
            twin_score=self._twins[np.arange(len(hosts)), facts.epoch],
            guess_loss=np.array([host.guess_loss for host in hosts]),
            rent=np.array(rents),
        )

    def _without_twin(self, inputs: RewardInputs) -> RewardInputs:
        return inputs._replace(twin_score=np.zeros(len(self.env_indices)))

    def _observe(self, facts: EpochFacts) -> Observation:
        return self._observer.observe(facts, self.vector.table, self.vector.action_space)
