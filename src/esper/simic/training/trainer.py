"""Training loop of a policy: PPO (Schulman et al. 2017) over episodes of growing networks.

An iteration collects one episode per environment, updates the policy and, when due, evaluates the policy.
Environments form fixed shards, which are divided among the processes of the training. Random streams are
named by (run, environment, episode) and every iteration starts new episodes, so a checkpoint consists of
policy, optimiser and iteration number.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from esper.files.row_files import RowMark
from esper.leyline import NUM_OPS, Head, Row, SlotConfig, UpdateRow, known
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.config import TrainingConfig
from esper.simic.rewards.families import RewardLog
from esper.simic.training import exchange
from esper.simic.training.policy_env import GrowthEnv, RowJournal
from esper.simic.training.rollout import ActionStreams, collect, evaluate
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCritic
from esper.tamiyo.policy.features import get_feature_size
from esper.tolaria.devices import Device
from esper.tolaria.env import EpisodeReport
from esper.tolaria.seeding import SELECTION_SEEDS
from esper.tolaria.tasks.spec import TaskSpec

SHARD_ENVS: Final = 2
"""Number of environments per shard: of one forward pass of the policy, whose last bits depend on it."""
PHASES: Final = ("rollout", "update", "evaluation")
NETWORK_SETTINGS: Final = {"hidden_dim", "critic", "conditioned", "hold_heads", "context"}
"""Names of ``TrainingConfig`` settings that are passed to the policy network as arguments of that name."""

T = TypeVar("T")


class PartialRollout(NamedTuple):
    """Rollout, reports and telemetry rows of one part of the environments in an iteration."""

    buffer: TamiyoRolloutBuffer
    reports: list[EpisodeReport]
    reward_log: RewardLog
    rows: list[Row]


class PolicyEvaluation(NamedTuple):
    """Mean return and score of a policy in episodes with argmax actions, on the selection rng seeds."""

    mean_return: float
    score: float | None
    """Mean validation score of the episodes that reached their horizon; None if no episode reached it."""


class Iteration(NamedTuple):
    """Telemetry rows of one training iteration."""

    rows: list[Row]
    """Telemetry rows of the episodes of an iteration, one environment after another."""
    update: UpdateRow


class TrainState(msgspec.Struct):
    """State of a training in a checkpoint."""

    iteration: Annotated[int, msgspec.Meta(ge=1)]
    best_return: float | None
    skipped_in_a_row: Annotated[int, msgspec.Meta(ge=0)]
    policy: dict[str, Any]
    optimiser: dict[str, Any]
    settings: dict[str, Any]
    rows: RowMark
    """Position of the row writer at the checkpoint."""


class Trainer:
    """Policy, optimiser and environments of a training, identical in all processes of the training.

    Args:
        task: Task of all environments.
        config: Configuration of the training.
        journal: Receiver of the telemetry rows of an iteration in progress, if any.
    """

    def __init__(self, task: TaskSpec, config: TrainingConfig, journal: RowJournal | None = None) -> None:
        self.task = task
        self.config = config
        capacity = config.capacity or task.num_slots
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.rng_seed)
            self.policy = FactoredRecurrentActorCritic(
                get_feature_size(SlotConfig.of_count(capacity), config.context),
                capacity,
                feature_dim=config.hidden_dim,
                **config.model_dump(include=NETWORK_SETTINGS),
            )
        self.policy.to(Device(config.policy_device).torch)
        self.agent = PPOAgent(self.policy, config)
        self.iteration = 0
        self.best_return = -np.inf
        self._training = self._make_envs(config.rng_seed, config.envs, journal)
        self._selection = self._make_envs(SELECTION_SEEDS[config.rng_seed], config.evaluate_episodes)

    def _make_envs(self, rng_seed: int, count: int, journal: RowJournal | None = None) -> list[GrowthEnv]:
        """Return the environments of all parts of the work, since any process can claim any part."""
        first, *others = map(Device, self.config.devices)
        # Only environments that train together keep several devices busy. On one CPU nothing is gained, and
        # shards that processes claim one by one even out the unequal costs of episodes.
        on_one_cpu = not (first.is_cuda or others)
        parts = count if on_one_cpu and exchange.world_size() > 1 else exchange.world_size()
        return [
            GrowthEnv(self.task, self.config, rng_seed=rng_seed, env_indices=envs, journal=journal)
            for envs in parts_of(count, parts)
        ]

    @property
    def is_over(self) -> bool:
        return self.iteration >= self.config.iterations

    def __iter__(self) -> Iterator[Iteration]:
        """Run the remaining training iterations."""
        while not self.is_over:
            yield self.run_iteration()

    def run_iteration(self) -> Iteration:
        """Collect one episode per environment and update the policy; evaluate it in every
        ``evaluate_every``-th and in the last iteration."""
        times = [time.perf_counter()]
        parts = _share_out(self._training, self._rollout)
        buffer = TamiyoRolloutBuffer.join([part.buffer for part in parts])
        rewards = RewardLog.join([part.reward_log for part in parts])
        reports = [report for part in parts for report in part.reports]
        times.append(time.perf_counter())

        metrics = self.agent.update(buffer, self.iteration / self.config.iterations)
        self.iteration += 1
        times.append(time.perf_counter())

        is_due = self.iteration % self.config.evaluate_every == 0 or self.is_over
        evaluation = self.evaluate() if is_due else None
        times.append(time.perf_counter())

        spans = [1000 * (end - start) for start, end in pairwise(times)]
        update = UpdateRow(
            iteration=self.iteration,
            mean_return=known(float(buffer.rewards.sum(dim=1).mean())),
            reward_terms=known(rewards.mean_terms()),
            reward_variance=known(rewards.variance()),
            reward_variance_unpaired=known(rewards.variance_unpaired()),
            val_score=_mean([report.val_score for report in reports]),
            params=_mean([report.params for report in reports]),
            broken_episodes=rewards.broken_episodes,
            op_shares=_op_shares(buffer.actions),
            evaluation_return=known(evaluation.mean_return) if evaluation else None,
            evaluation_score=evaluation.score if evaluation else None,
            seconds=times[-1] - times[0],
            phase_ms=dict(zip(PHASES, spans, strict=True)),
            **metrics.columns(),
        )
        return Iteration([row for part in parts for row in part.rows], update)

    def _rollout(self, env: GrowthEnv) -> PartialRollout:
        """Run one episode with sampled actions in every environment of a part."""
        env.next_episode = self.iteration
        streams = ActionStreams(self.config.rng_seed, env.env_indices, self.iteration)
        buffer = collect(env, self.policy, streams, at_once=SHARD_ENVS)
        return PartialRollout(buffer, env.reports, env.reward_log, env.rows)

    def evaluate(self) -> PolicyEvaluation:
        """Evaluate the policy on the rng seeds reserved for selecting the best policy."""
        results = _share_out(self._selection, self._evaluate)
        returns = [value for returns, _ in results for value in returns]
        scores = [report.val_score for _, reports in results for report in reports]
        return PolicyEvaluation(float(np.mean(returns)), _mean(scores))

    def _evaluate(self, env: GrowthEnv) -> tuple[list[float], list[EpisodeReport]]:
        env.next_episode = 0
        return evaluate(env, self.policy, at_once=SHARD_ENVS).tolist(), env.reports

    # --- checkpoints --------------------------------------------------------------------------

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the training, which must not change when it is resumed."""
        return {**self.config.model_dump(mode="json"), "task": self.task.name, "horizon": self.task.horizon}

    def state(self) -> dict[str, Any]:
        """Return the state of a checkpoint as the fields of ``TrainState``, without ``rows``."""
        return {
            "iteration": self.iteration,
            "best_return": None if np.isinf(self.best_return) else self.best_return,
            "skipped_in_a_row": self.agent.skipped_in_a_row,
            "policy": self.policy.state_dict(),
            "optimiser": self.agent.optimiser.state_dict(),
            "settings": self.settings,
        }

    def load(self, state: TrainState) -> None:
        """Restore the state of a checkpoint; torch raises an error for the state of another network."""
        self.policy.load_state_dict(state.policy)
        self.agent.optimiser.load_state_dict(state.optimiser)
        self.iteration = state.iteration
        self.best_return = -np.inf if state.best_return is None else state.best_return
        self.agent.skipped_in_a_row = state.skipped_in_a_row


def _share_out(envs: Sequence[GrowthEnv], run: Callable[[GrowthEnv], T]) -> list[T]:
    """Apply ``run`` to all parts of the work, which processes claim; return the results in order."""
    return exchange.gather({part: run(envs[part]) for part in exchange.claim(len(envs))})


def parts_of(count: int, most: int) -> list[range]:
    """Divide ``count`` environments into at most ``most`` ranges of whole shards."""
    edges = [*range(0, count, SHARD_ENVS), count]
    parts = min(most, len(edges) - 1)
    cuts = [edges[(len(edges) - 1) * part // parts] for part in range(parts + 1)]
    return [range(*pair) for pair in pairwise(cuts)]


def _mean(values: Sequence[float]) -> float | None:
    """Return the mean of ``values``; ``None`` if there are no values or the mean is not finite."""
    return known(float(np.mean(values))) if values else None


def _op_shares(actions: Tensor) -> list[float]:
    counts = torch.bincount(actions[..., Head.OP].flatten(), minlength=NUM_OPS)
    return (counts / counts.sum()).tolist()
