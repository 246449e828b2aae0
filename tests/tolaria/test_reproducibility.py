"""Episodes are reproducible bit for bit, and independent of other environments and episodes."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from esper.leyline import EpochFacts, Row
from esper.leyline.rows import EnvRow
from esper.tolaria.env import MorphEnv
from esper.tolaria.tasks import TaskSpec
from esper.tolaria.vector import SerialVector
from tests.tolaria.building import PLAN, WAIT, ListSink, bits, host_bits, noisy_task, run, started, tiny_task


def timeless(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return telemetry rows as dictionaries without columns of measured times."""
    maps = [{"table": type(row).__name__, **msgspec.structs.asdict(row)} for row in rows]
    return [{k: v for k, v in row.items() if k not in ("t", "ms", "phase_ms", "seconds")} for row in maps]


def everything_in(env: MorphEnv) -> Any:
    """Return host, seeds, optimiser, random streams, slot table, loss scales and past scores, as bytes."""
    return host_bits(env), bits(env.host.weights()), bits(env._val_scores)


@pytest.mark.parametrize("make_task", [tiny_task, noisy_task])
def test_same_rng_seed_gives_the_same_episode_and_leaves_torchs_global_generator_unchanged(
    make_task: Callable[..., TaskSpec],
) -> None:
    episodes = []
    for _ in range(2):
        before = torch.get_rng_state()
        env, sink = started(make_task(horizon=12))
        facts = [bits(asdict(env.step(PLAN.get(epoch, WAIT)))) for epoch in range(12)]
        episodes.append((facts, everything_in(env), bits(asdict(env.finish())), timeless(sink.rows)))
        assert torch.equal(torch.get_rng_state(), before), "nothing is drawn from the global generator"
        torch.rand(7)  # Other code draws random numbers between the two episodes.
    assert episodes[0] == episodes[1]


def test_another_rng_seed_environment_or_episode_gives_another_host() -> None:
    env, _ = started()
    untrained = host_bits(env)
    for change in ({"rng_seed": 1}, {"env": 1}):
        assert host_bits(started(**change)[0]) != untrained
    first = host_bits(run(env, PLAN, until=5))
    env.reset(1)
    assert host_bits(run(env, PLAN, until=5)) != first
    env.reset(0)
    assert host_bits(run(env, PLAN, until=5)) == first


def run_vector(env_indices: Sequence[int], growing: Sequence[int]) -> tuple[SerialVector, ListSink, Any]:
    """Run ten epochs in which the environments ``growing`` plant seeds by ``PLAN`` and all others wait."""
    sink = ListSink()
    vector = SerialVector(noisy_task(horizon=10), rng_seed=3, env_indices=env_indices, sink=sink)
    history = [vector.reset()]
    for epoch in range(10):
        rows = [PLAN.get(epoch, WAIT) if env in growing else WAIT for env in env_indices]
        history.append(vector.step(np.stack(rows)))
        vector.record_decisions(None)
    vector.finish()
    return vector, sink, history


def episode_of(vector: SerialVector, sink: ListSink, history: list[EpochFacts], env: int) -> Any:
    """Return state, measurements after every epoch and telemetry rows of one environment."""
    row = [one._env for one in vector.envs].index(env)
    facts = [{name: values[row] for name, values in asdict(facts).items()} for facts in history]
    own = [found for found in sink.rows if isinstance(found, EnvRow) and found.env == env]
    return everything_in(vector.envs[row]), bits(facts), timeless(own)


def test_episode_of_an_environment_does_not_depend_on_growth_or_number_of_other_environments() -> None:
    bare = run_vector(range(3), growing=[])
    grown = run_vector(range(3), growing=[1])
    assert episode_of(*bare, env=2) == episode_of(*grown, env=2)
    assert episode_of(*bare, env=1) != episode_of(*grown, env=1)
    alone = run_vector([1], growing=[1])
    assert episode_of(*grown, env=1) == episode_of(*alone, env=1), "alone or with two others"
