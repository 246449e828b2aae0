"""Episodes of sixteen hosts on digits under an untrained policy, every row written: what a step costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from esper.simic.training.recorder import complete

from esper.nissa.journal import IterationJournal
from esper.nissa.writer import RunWriter
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.training import growth
from esper.simic.training.proving import new_policy
from esper.simic.training.rollout import ActionStreams, collect
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCritic, PolicyShape
from esper.tamiyo.policy.features import BASE_SIZE, SLOT_SIZE
from esper.tolaria.tasks import task_named

NUM_ENVS = 16


class Stopwatch:
    """CPU seconds inside wrapped functions, none of which calls another."""

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
class Episodes:
    """One rollout, before it is lived; twins are known beforehand."""

    env: growth.GrowthEnv
    policy: FactoredRecurrentActorCritic
    buffer: TamiyoRolloutBuffer
    horizon: int

    @classmethod
    def prepare(cls, patch: pytest.MonkeyPatch) -> Episodes:
        task = task_named("digits")
        shape = PolicyShape(BASE_SIZE + SLOT_SIZE * task.num_slots, task.num_slots)
        env = growth.GrowthEnv(task, rng_seed=0, env_indices=range(NUM_ENVS))
        sizes = shape.state_dim, shape.num_slots, shape.hidden_dim
        patch.setattr(growth, "twin_scores", lambda *args, **kwargs: [90.0] * (task.horizon + 1))
        return cls(
            env, new_policy(shape, 0), TamiyoRolloutBuffer(NUM_ENVS, task.horizon, *sizes), task.horizon
        )

    def live(self, directory: Path, watch: Stopwatch) -> float:
        """One iteration as a training episodes and writes it, in full; its CPU seconds.

        ``watch`` is told of what it takes to complete the rows and of writing them, to journals and tables.
        """
        completed, recorders = watch.wrap("rows", complete), self.env.recorders
        with RunWriter(directory, resumable=True) as writer:
            take = watch.wrap("writer", IterationJournal(directory, "full", writer.began).take)

            def settle() -> None:
                take(1, 0, completed(recorders, self.buffer, self.env.reward_log.ledgers, self.policy.sizes))

            def write() -> None:
                with writer.adding_iteration(1):
                    for recorder in recorders:
                        for row in recorder.rows:
                            writer.emit(row)

            began = time.process_time()
            collect(self.env, self.policy, ActionStreams(0, range(NUM_ENVS)), self.buffer, settle)
            watch.wrap("writer", write)()
            return time.process_time() - began
