"""The training loop: iterations of one episode per environment and one update, evaluated and checkpointed.

Environments are grouped into fixed shards that processes share out among themselves. Everything
random is named by (run, environment, episode), and an iteration begins new episodes everywhere, so a
checkpoint between iterations is the policy, its optimiser and the number of the iteration.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from esper.leyline import NUM_OPS, Head
from esper.leyline.events import Row
from esper.simic.agent.ppo import PolicyDivergedError, PPOAgent, PPOSettings, UpdateMetrics, shards
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.rewards.families import FamilyName
from esper.simic.rewards.reward_log import RewardLog
from esper.simic.training import exchange
from esper.simic.training.growth import GrowthEnv
from esper.simic.training.recorder import complete
from esper.simic.training.rollout import ActionStreams, collect, evaluate
from esper.tamiyo.networks.factored_lstm import Critic, FactoredRecurrentActorCritic
from esper.tamiyo.policy.checkpoint import (
    CheckpointError,
    load_policy,
    load_tensors,
    read_json,
    save_policy,
    save_tensors,
    write_durably,
)
from esper.tamiyo.policy.features import BASE_SIZE, SLOT_SIZE
from esper.tolaria.env import EpisodeReport
from esper.tolaria.seeding import SELECTION_SEEDS
from esper.tolaria.tasks.spec import TaskSpec

PHASES = ("rollout", "update", "evaluation")
OPTIMISER_FILE = "optimiser.safetensors"
PROGRESS_FILE = "progress.json"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """What a training run is made of, besides its task."""

    rng_seed: int = 0
    envs: int = 32
    shard_envs: int = 2
    iterations: int = 40
    capacity: int | None = None
    hidden_dim: int = 256
    critic: Critic = "state_value"
    conditioned: bool = True
    hold_heads: tuple[str, ...] = ()
    reward_family: FamilyName = "paired"
    rent: float = 0.01
    reward_scale: float = 5.0
    horizon_terminates: bool = True
    evaluate_every: int = 5
    evaluate_episodes: int = 16
    checkpoint_every: int = 5
    ppo: PPOSettings = field(default_factory=PPOSettings)


class IterationSummary(NamedTuple):
    """One iteration, for whoever watches; what there was none of is ``None``."""

    iteration: int
    mean_return: float
    reward_terms: dict[str, float]
    """Mean per environment of what each term paid; they sum to ``mean_return``."""
    reward_variance: float
    reward_variance_unpaired: float | None
    """What it would be without the twin."""
    val_score: float | None
    params: float | None
    """Means over the episodes that reached their horizon."""
    broken_episodes: int
    op_shares: tuple[float, ...]
    metrics: UpdateMetrics
    rows: list[Row]
    """Of the episodes, one environment after the other."""
    evaluation_return: float | None
    evaluation_score: float | None
    seconds: float
    phase_ms: dict[str, float]


class ShardRollout(NamedTuple):
    """What one shard brings back from an iteration."""

    buffer: TamiyoRolloutBuffer
    reports: list[EpisodeReport]
    reward_log: RewardLog
    rows: list[Row]


class Trainer:
    """A policy in training; every process of a run holds the same one."""

    def __init__(self, task: TaskSpec, settings: TrainingSettings) -> None:
        self.task = task
        self.settings = settings
        capacity = settings.capacity or task.num_slots
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.rng_seed)
            self.policy = FactoredRecurrentActorCritic(
                BASE_SIZE + SLOT_SIZE * capacity,
                capacity,
                feature_dim=settings.hidden_dim,
                hidden_dim=settings.hidden_dim,
                critic=settings.critic,
                conditioned=settings.conditioned,
                hold_heads=settings.hold_heads,
            )
        self.agent = PPOAgent(self.policy, settings.ppo)
        self.iteration = 0
        self.best_return = -np.inf
        self.on_rows: Callable[[int, int, Sequence[Row]], None] = lambda number, env, rows: None
        """Told of the rows of every epoch as they come: the iteration, the first environment of the shard, rows.

        Each process hears of its own shards; all rows of an iteration stand in its summary."""
        self._training = self._make_shards(settings.rng_seed, settings.envs)
        self._selection = self._make_shards(SELECTION_SEEDS[settings.rng_seed], settings.evaluate_episodes)

    def _make_shards(self, rng_seed: int, count: int) -> list[GrowthEnv]:
        """All shards, since each may fall to any process; their hosts are built by the first reset."""
        return [
            self._make_envs(rng_seed, range(count)[shard])
            for shard in shards(count, self.settings.shard_envs)
        ]

    def _make_envs(self, rng_seed: int, indices: Sequence[int]) -> GrowthEnv:
        return GrowthEnv(
            self.task,
            rng_seed=rng_seed,
            env_indices=indices,
            family=self.settings.reward_family,
            rent=self.settings.rent,
            scale=self.settings.reward_scale,
            horizon_terminates=self.settings.horizon_terminates,
            capacity=self.settings.capacity,
        )

    @property
    def is_over(self) -> bool:
        """All iterations were run."""
        return self.iteration >= self.settings.iterations

    # --- an iteration ------------------------------------------------------------------------------

    def run_iteration(self) -> IterationSummary:
        """Collect one episode per environment everywhere, learn from all of them, evaluate when due."""
        times = [time.perf_counter()]
        parts = _share_out(self._training, self._rollout)
        times.append(time.perf_counter())
        buffer = TamiyoRolloutBuffer.join([part.buffer for part in parts])
        reports = [report for part in parts for report in part.reports]
        reward_log = RewardLog.join([part.reward_log for part in parts])
        metrics = self.agent.update(buffer, self.iteration / self.settings.iterations)
        times.append(time.perf_counter())
        self.iteration += 1
        due = self.iteration % self.settings.evaluate_every == 0 or self.is_over
        evaluation = self.evaluate() if due else None
        times.append(time.perf_counter())
        return IterationSummary(
            iteration=self.iteration,
            mean_return=float(buffer.rewards.sum(dim=1).mean()),
            reward_terms=reward_log.paid(),
            reward_variance=reward_log.variance(),
            reward_variance_unpaired=reward_log.variance_unpaired(),
            val_score=_mean([report.val_score for report in reports]) if reports else None,
            params=_mean([report.params for report in reports]) if reports else None,
            broken_episodes=reward_log.broken_episodes,
            op_shares=_op_shares(buffer.actions),
            metrics=metrics,
            rows=[row for part in parts for row in part.rows],
            evaluation_return=evaluation[0] if evaluation else None,
            evaluation_score=evaluation[1] if evaluation else None,
            seconds=times[-1] - times[0],
            phase_ms={
                phase: 1000 * (end - start)
                for phase, (start, end) in zip(PHASES, pairwise(times), strict=True)
            },
        )

    def _rollout(self, env: GrowthEnv) -> ShardRollout:
        shape = self.policy.shape
        buffer = TamiyoRolloutBuffer(
            len(env.env_indices), env.horizon, shape.state_dim, shape.num_slots, shape.hidden_dim
        )
        env.seek(self.iteration)
        streams = ActionStreams(self.settings.rng_seed, env.env_indices, self.iteration)

        def settle() -> None:
            rows = complete(env.recorders, buffer, env.reward_log.ledgers, self.policy.sizes)
            self.on_rows(self.iteration + 1, env.env_indices[0], rows)

        collect(env, self.policy, streams, buffer, after_step=settle)
        rows = [row for recorder in env.recorders for row in recorder.rows]
        return ShardRollout(buffer, env.reports, env.reward_log, rows)

    def evaluate(self) -> tuple[float, float | None]:
        """Mean return of argmax episodes on rng seeds kept for selection, and score of those that lasted."""
        results = _share_out(self._selection, self._evaluate_shard)
        returns = [value for returns, _ in results for value in returns]
        scores = [report.val_score for _, reports in results for report in reports]
        return _mean(returns), _mean(scores) if scores else None

    def _evaluate_shard(self, env: GrowthEnv) -> tuple[list[float], list[EpisodeReport]]:
        env.seek(0)
        returns = evaluate(env, self.policy)
        return returns.tolist(), env.reports

    # --- checkpoints --------------------------------------------------------------------------

    def save(self, directory: Path, extra: Mapping[str, Any]) -> None:
        """Write policy, optimiser and progress into ``directory``."""
        save_policy(self.policy, directory)
        write_durably(directory / OPTIMISER_FILE, save_tensors(_flat_optimiser(self.agent.optimiser)))
        progress = {
            "iteration": self.iteration,
            "best_return": None if np.isinf(self.best_return) else self.best_return,
            "skipped_in_a_row": self.agent.skipped_in_a_row,
            "task": self.task.name,
            "horizon": self.task.horizon,
            "settings": asdict(self.settings),
            **extra,
        }
        write_durably(directory / PROGRESS_FILE, (json.dumps(progress, indent=1) + "\n").encode())

    def load(self, directory: Path) -> dict[str, Any]:
        """Continue from a checkpoint of the same run; returns what was stored with it."""
        progress = read_json(directory / PROGRESS_FILE)
        self._check_own(progress, directory)
        self.policy.load_state_dict(load_policy(directory).state_dict())
        _load_optimiser(self.agent.optimiser, load_tensors(directory / OPTIMISER_FILE))
        self.iteration = int(progress["iteration"])
        best = progress["best_return"]
        self.best_return = -np.inf if best is None else float(best)
        self.agent.skipped_in_a_row = int(progress["skipped_in_a_row"])
        return progress

    def _check_own(self, progress: dict[str, Any], directory: Path) -> None:
        ours = json.loads(json.dumps(asdict(self.settings)))
        theirs = progress.get("settings", {})
        different = [name for name in ours if ours[name] != theirs.get(name)]
        for name, own in (("task", self.task.name), ("horizon", self.task.horizon)):
            if progress.get(name) != own:
                different.append(name)
        if different:
            raise CheckpointError(
                f"the checkpoint in '{directory}' belongs to another run; different: {', '.join(different)}"
            )


def train(
    trainer: Trainer,
    on_iteration: Callable[[IterationSummary], None] = lambda summary: None,
    on_best: Callable[[], bool] = lambda: True,
    on_checkpoint: Callable[[], object] = lambda: None,
) -> None:
    """Run the iterations that are left; the callbacks record an iteration, keep the best policy, save the state.

    A policy is the best one if it was kept. A run that ends because its updates are not finite saves its
    state first.
    """
    while not trainer.is_over:
        try:
            summary = trainer.run_iteration()
        except PolicyDivergedError:
            on_checkpoint()
            raise
        on_iteration(summary)
        reached = summary.evaluation_return
        if reached is not None and reached > trainer.best_return and on_best():
            trainer.best_return = reached
        if trainer.iteration % trainer.settings.checkpoint_every == 0 or trainer.is_over:
            on_checkpoint()


def _share_out(envs: Sequence[GrowthEnv], run: Callable[[GrowthEnv], T]) -> list[T]:
    """What all processes together make of all shards, in shard order."""
    return exchange.gather({shard: run(envs[shard]) for shard in exchange.claim(len(envs))})


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _op_shares(actions: Tensor) -> tuple[float, ...]:
    counts = torch.bincount(actions[..., Head.OP].flatten(), minlength=NUM_OPS)
    return tuple((counts / counts.sum()).tolist())


def _flat_optimiser(optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state by parameter number and name."""
    state = optimiser.state_dict()["state"]
    return {f"{index}.{name}": torch.as_tensor(v) for index, s in state.items() for name, v in s.items()}


def _load_optimiser(optimiser: torch.optim.Optimizer, flat: dict[str, Tensor]) -> None:
    whole = optimiser.state_dict()
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in flat.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    whole["state"] = state
    optimiser.load_state_dict(whole)
