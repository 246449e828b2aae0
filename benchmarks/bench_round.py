"""How much of a rollout is spent on anything but training and validating hosts."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measuring import figure
from esper.leyline.events import EpochRow, Row
from esper.nissa.writer import RunWriter
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.training import growth
from esper.simic.training.proving import new_policy
from esper.simic.training.rollout import ActionStreams, collect
from esper.tamiyo.networks.factored_lstm import PolicyShape
from esper.tamiyo.policy.features import BASE_SIZE, SLOT_SIZE
from esper.tamiyo.policy.observer import Observer
from esper.tolaria import env as engine
from esper.tolaria import recording
from esper.tolaria.tasks import task_named

NUM_ENVS = 16
LIMIT = 0.15
HOST_WORK = ("training", "validation")


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


class FlushingWriter(RunWriter):
    """Hands every epoch of every environment to the operating system, more often than a run does."""

    def emit(self, row: Row) -> None:
        super().emit(row)
        if type(row) is EpochRow:
            self.flush()


def bench_all_but_training_and_validation_takes_at_most_15_percent_of_a_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One life of 16 hosts under an untrained policy, every row written, twins known beforehand."""
    task = task_named("digits")
    policy = new_policy(PolicyShape(BASE_SIZE + SLOT_SIZE * task.num_slots, task.num_slots), 0)
    env = growth.GrowthEnv(task, rng_seed=0, env_indices=range(NUM_ENVS))
    shape = policy.shape
    buffer = TamiyoRolloutBuffer(NUM_ENVS, task.horizon, shape.state_dim, shape.num_slots, shape.hidden_dim)
    monkeypatch.setattr(growth, "twin_scores", lambda *args, **kwargs: [90.0] * (task.horizon + 1))
    watch = Stopwatch()
    for name, owner, function in (
        ("training", engine, "train_epoch"),
        ("validation", engine, "measure"),
        ("policy", policy, "get_action"),
        ("observation and masks", Observer, "observe"),
        ("rewards", growth.GrowthEnv, "_judge"),
        ("buffer", buffer, "add"),
        ("buffer", buffer, "add_next_value"),
        ("buffer", buffer, "add_outcome"),
        ("rows", recording, "emit_epoch"),
        ("rows", recording, "emit_decision"),
        ("rows", recording, "emit_moves"),
        ("rows", recording, "emit_counterfactuals"),
    ):
        monkeypatch.setattr(owner, function, watch.wrap(name, getattr(owner, function)))

    with FlushingWriter(tmp_path / "run") as writer:
        for life in env._vector.envs:
            life.sink = writer
        began = time.process_time()
        collect(env, policy, ActionStreams(0, range(NUM_ENVS)), buffer)
        total = time.process_time() - began

    shares = {name: seconds / total for name, seconds in watch.seconds.items()}
    shares["births, actions and everything else"] = 1.0 - sum(shares.values())
    rest = 1.0 - sum(shares[name] for name in HOST_WORK)
    figure(
        f"a life of {NUM_ENVS} hosts on digits, {total:.1f} s",
        f"not training or validation {rest:.1%} (limit {LIMIT:.0%}); "
        + ", ".join(f"{name} {share:.2%}" for name, share in shares.items()),
    )
    assert rest <= LIMIT
