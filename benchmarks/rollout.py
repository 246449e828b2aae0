"""Rollout of sixteen hosts on digits under an untrained policy, shared by several benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from esper.nissa.iteration_journal import IterationJournal
from esper.nissa.writer import RunWriter
from esper.simic.config import TrainingConfig
from esper.simic.training import policy_env
from esper.simic.training.rollout import ActionStreams, collect
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCritic, PolicyShape
from esper.tamiyo.policy.features import BASE_SIZE, SLOT_SIZE
from esper.tolaria.tasks import task_named
from tests.simic.oracles.trial import new_policy

NUM_ENVS = 16


class Stopwatch:
    """CPU seconds spent in the functions that ``wrap`` returned; none of them may call another."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - began

        return timed


@dataclass(frozen=True, slots=True)
class Rollout:
    """Rollout of the first iteration of a policy training, with constants in place of the scores of twins
    (hosts without growth).
    """

    directory: Path
    journal: IterationJournal
    env: policy_env.GrowthEnv
    policy: FactoredRecurrentActorCritic
    horizon: int

    @classmethod
    def prepare(cls, directory: Path, patch: pytest.MonkeyPatch) -> Rollout:
        task = task_named("digits")
        shape = PolicyShape(BASE_SIZE + SLOT_SIZE * task.num_slots, task.num_slots)
        journal = IterationJournal(directory, "full")
        env = policy_env.GrowthEnv(
            task, TrainingConfig(), rng_seed=0, env_indices=range(NUM_ENVS), journal=journal
        )
        patch.setattr(policy_env, "twin_scores", lambda _, of, **__: [[90.0] * (task.horizon + 1)] * len(of))
        return cls(directory, journal, env, new_policy(shape, 0), task.horizon)

    def run(self, patch: pytest.MonkeyPatch, watch: Stopwatch) -> float:
        """Collect the episodes of an iteration and write all their rows; return the CPU seconds of the two
        together.

        Under the name "writer", the stopwatch ``watch`` records the CPU seconds of writing rows to the
        journal and to the file of the iteration.
        """
        patch.setattr(IterationJournal, "take", watch.wrap("writer", IterationJournal.take))
        with RunWriter(self.directory) as writer:
            self.journal.began = writer.began

            def write() -> None:
                with writer.iteration(1):
                    for row in self.env.rows:
                        writer.emit(row)

            began = time.process_time()
            collect(self.env, self.policy, ActionStreams(0, range(NUM_ENVS)))
            watch.wrap("writer", write)()
            return time.process_time() - began
