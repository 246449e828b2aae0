"""Environments restored from a snapshot continue bit for bit."""

import io
from dataclasses import asdict
from typing import Any

import pytest
import torch

from esper.leyline import BlueprintAction, EsperError, LifecycleOp, LifecycleRules, Stage, Style
from esper.leyline.errors import DataError
from esper.leyline.slot_table import IntArray
from esper.tolaria.env import MorphEnv
from esper.tolaria.tasks import TaskSpec
from tests.tolaria.building import WAIT, action, bits, noisy_task, plant, run, stages_of, started, tiny_task

BEFORE = {
    0: plant(1, BlueprintAction.CONV_HEAVY),
    4: plant(0, BlueprintAction.DEPTHWISE, style=Style.GATED_GATE),
    5: action(LifecycleOp.FOSSILIZE, 1),
    6: plant(2, BlueprintAction.NORM),
}
AFTER = {7: action(LifecycleOp.PRUNE, 0, alpha_speed=0), 10: action(LifecycleOp.PRUNE, 2), 11: plant(0)}


def mid_blend(task: TaskSpec | None = None) -> MorphEnv:
    """Return an environment with a blending seed, a fossil and an incubating seed."""
    env, _ = started(task or tiny_task(batches_per_epoch=2))
    run(env, BEFORE, until=7)
    assert stages_of(env) == [Stage.BLENDING, Stage.FOSSILIZED, Stage.TRAINING]
    assert 0.0 < env.table.alpha[0, 0] < 1.0
    return env


def five_more(env: MorphEnv, actions: dict[int, IntArray] = AFTER) -> Any:
    """Return the measurements of the environment's next five steps and its state after them, as bytes."""
    facts = [asdict(env.step(actions.get(env.epoch, WAIT))) for _ in range(5)]
    return bits(facts), bits(env.state())


def through_a_file(kept: dict[str, Any]) -> dict[str, Any]:
    """Save an environment's state to a file and load the file with ``weights_only=True``."""
    file = io.BytesIO()
    torch.save(kept, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def test_environment_restored_from_a_snapshot_continues_bit_for_bit() -> None:
    env = mid_blend(noisy_task(horizon=12, batches_per_epoch=2))
    kept = env.state()
    before = bits(kept)
    first = five_more(env), bits(asdict(env.finish()))
    env.load_state(kept)
    assert bits(env.state()) == before
    with pytest.raises(DataError, match="before the network was committed"):
        env.finish()
    assert (five_more(env), bits(asdict(env.finish()))) == first
    assert bits(kept) == before, "the environment does not change the snapshot"


def test_snapshot_loaded_from_a_file_continues_bit_for_bit_in_a_new_and_in_a_used_environment() -> None:
    env = mid_blend()
    kept = through_a_file(env.state())
    first = five_more(env)
    fresh, begun = (MorphEnv(env.task, rng_seed=0) for _ in range(2))
    begun.reset(5)
    run(begun, {0: plant(2)}, until=3)
    for other in (fresh, begun):
        other.load_state(kept)
        assert five_more(other) == first


def test_snapshot_contains_the_random_stream_that_samples_orders_for_shapley_values() -> None:
    rules = LifecycleRules(min_training_epochs=0)
    env, _ = started(tiny_task((2, 2, 2, 2, 2), rules=rules))
    run(env, {epoch: plant(epoch) for epoch in range(5)}, until=6)
    kept = env.state()
    first = five_more(env, {})
    assert len(kept["counted"]["_val_scores"]) == 7
    env.load_state(kept)
    assert five_more(env, {}) == first


def test_environment_refuses_a_snapshot_of_another_rng_seed_or_environment() -> None:
    kept = mid_blend().state()
    for other, sentence in (
        (MorphEnv(tiny_task(), rng_seed=1), "rng seed 0, environment 0; this one is task tiny, rng seed 1"),
        (MorphEnv(tiny_task(), rng_seed=0, env=2), "rng seed 0, environment 2"),
    ):
        with pytest.raises(EsperError, match=sentence):
            other.load_state(kept)
