"""CPU time of one decision of a policy without its network: observation, action masks, and the write to the
rollout buffer.
"""

import numpy as np
import pytest
import torch

from benchmarks.timing import cpu_times, figure
from esper.leyline import NUM_HEADS, SlotTable, TrainingSignals
from esper.leyline.stages import LIVE_STAGES
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.tamiyo.policy.action_masks import compute_batch_masks
from esper.tamiyo.policy.features import batch_obs_to_features
from esper.tamiyo.tracker import SignalTracker
from tests.leyline.building import facts_of, random_table, space_of
from tests.simic.oracles.trial import SMALL, new_policy
from tests.tamiyo.policy.observations import FLAGS, MEASUREMENTS

SPACE = space_of(SMALL.num_slots)
OBSERVATION_LIMIT = {4: 0.1, 16: 0.15}
"""Largest allowed milliseconds to compute the observation of all environments, by the number of environments.
"""
MASKS_LIMIT = 0.15
WRITE_LIMIT = 0.3
REPEATS = 200


def live_table(num_envs: int) -> SlotTable:
    """Return a slot table with a live seed and random measurements in every slot."""
    rng = np.random.default_rng(0)
    table = random_table(rng, num_envs, SMALL.num_slots)
    shape = table.stage.shape
    table.enabled[...] = True
    table.stage[...] = rng.choice(sorted(LIVE_STAGES), shape)
    table.blueprint[...] = rng.choice(SPACE.blueprints, shape)
    table.epochs_since_measured[...] = rng.integers(0, 9, shape)
    for name in MEASUREMENTS:
        getattr(table, name)[...] = rng.integers(0, 2, shape) if name in FLAGS else rng.normal(size=shape)
    return table


def signals_of(num_envs: int) -> TrainingSignals:
    tracker = SignalTracker(num_envs)
    for epoch in range(4):
        signals = tracker.update(
            facts_of(epoch, loss=2.0 / (1 + epoch), score=20.0 * epoch, num_envs=num_envs)
        )
    return signals


@pytest.mark.parametrize("num_envs", OBSERVATION_LIMIT)
def bench_an_observation(num_envs: int) -> None:
    signals, table = signals_of(num_envs), live_table(num_envs)
    assert table.live.all()
    times = cpu_times(
        {"features": lambda: batch_obs_to_features(signals, table, SPACE.slot_config)}, repeats=REPEATS
    )

    limit = OBSERVATION_LIMIT[num_envs]
    figure(f"observation of {num_envs} environments", times["features"], "ms", at_most=limit)


def bench_the_masks_of_16_environments() -> None:
    table = live_table(16)
    times = cpu_times({"masks": lambda: compute_batch_masks(table, SPACE)}, repeats=REPEATS)

    figure("masks of 16 environments", times["masks"], "ms", at_most=MASKS_LIMIT)


def bench_the_write_of_a_step_of_16_environments() -> None:
    policy = new_policy(SMALL, 0)
    table = live_table(16)
    features, blueprints = batch_obs_to_features(signals_of(16), table, SPACE.slot_config)
    hidden = policy.get_initial_hidden(16)
    with torch.no_grad():
        decision = policy.get_action(
            features,
            blueprints,
            hidden,
            compute_batch_masks(table, SPACE),
            uniforms=torch.rand(16, NUM_HEADS),
        )
    reward, flags = torch.randn(16), torch.zeros(16, dtype=torch.bool)
    buffer = TamiyoRolloutBuffer(16, REPEATS, SMALL.state_dim, SMALL.num_slots, SMALL.hidden_dim)

    def write() -> None:
        if buffer.length == buffer.num_steps:
            buffer.length = 0
        buffer.add(features, blueprints, decision, flags)
        buffer.add_outcome(reward, flags, flags)
        buffer.add_next_value(decision.value)

    times = cpu_times({"write": write}, repeats=REPEATS)

    figure("buffer write of 16 environments", times["write"], "ms", at_most=WRITE_LIMIT)
