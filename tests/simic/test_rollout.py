from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline import OP_GERMINATE, Head
from esper.simic.advantages import gae
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.config import TrainingConfig
from esper.simic.training.policy_env import GrowthEnv, PolicyStep
from esper.simic.training.rollout import ActionStreams, collect, evaluate
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCritic
from esper.tamiyo.policy.features import Observation
from tests.simic.oracles.lifecycle_envs import Lifecycle
from tests.simic.oracles.toy_envs import Distractors, Memory, Rent, ToyOracle
from tests.simic.oracles.trial import new_policy, random_return
from tests.simic.rollouts import TINY, roll
from tests.tolaria.building import tiny_task


def test_random_numbers_for_actions_of_an_environment_do_not_depend_on_other_environments() -> None:
    alone, among = ActionStreams(5, [3]), ActionStreams(5, [0, 3, 7])
    first, second = among.draw(), among.draw()
    assert first.shape == (3, 8)
    assert torch.equal(alone.draw()[0], first[1])
    assert torch.equal(alone.draw()[0], second[1])
    assert len(torch.cat([first, second]).unique(dim=0)) == 6
    assert not torch.equal(ActionStreams(6, [3]).draw(), ActionStreams(5, [3]).draw())
    assert not torch.equal(ActionStreams(5, [3], episode=1).draw(), ActionStreams(5, [3]).draw())


def test_rollout_consists_of_whole_episodes_that_terminate_at_the_horizon() -> None:
    _, buffer = roll(Rent, episodes=2)
    ends = [False] * 5 + [True]
    assert buffer.ended.tolist() == [ends * 2] * 4
    assert buffer.terminated.tolist() == [ends * 2] * 4
    starts = [True] + [False] * 5
    assert buffer.fresh.tolist() == [starts * 2] * 4
    assert buffer.length == 12


def test_next_value_of_a_step_in_the_rollout_buffer_is_the_value_of_the_next_step() -> None:
    _, buffer = roll(Rent, episodes=2)
    assert torch.equal(buffer.next_values[:, :-1], buffer.values[:, 1:])
    assert buffer.next_values[:, -1].tolist() == [0.0] * 4
    assert buffer.values.unique().numel() > 4


class Remembering(GrowthEnv):
    """Environment of growing networks that stores its last observation."""

    seen: Observation

    def step(self, actions: NDArray[np.int64], outputs: Any = None) -> PolicyStep:
        step = super().step(actions, outputs)
        self.seen = step.observation
        return step


def value_seen_at_the_end(
    policy: FactoredRecurrentActorCritic, buffer: TamiyoRolloutBuffer, env: Remembering
) -> Tensor:
    """Return the critic's value of the last observation, with the LSTM state after all earlier steps."""
    streams = ActionStreams(0, env.env_indices)
    for _ in range(buffer.num_steps):
        streams.draw()
    with torch.no_grad():
        _, memory = policy.encode(buffer.state, buffer.blueprint_indices, buffer.hidden)
        decision = policy.get_action(
            env.seen.features, env.seen.blueprint_indices, memory, env.seen.masks, uniforms=streams.draw()
        )
    return decision.value


@pytest.mark.parametrize(
    ("terminates", "critic"), [(True, "state_value"), (False, "state_value"), (False, "op_value")]
)
def test_value_after_a_truncated_episode_is_computed_with_the_lstm_state_of_the_episode(
    terminates: bool, critic: str
) -> None:
    config = TrainingConfig(horizon_terminates=terminates)
    env = Remembering(tiny_task(horizon=3), config, rng_seed=3, env_indices=range(2))
    policy = new_policy(replace(TINY, critic=critic), 0)
    buffer = collect(env, policy, ActionStreams(0, range(2)))
    beyond = value_seen_at_the_end(policy, buffer, env)
    assert beyond.abs().min() > 1e-3
    assert beyond.tolist() != pytest.approx(buffer.values[:, -1].tolist(), abs=1e-3)
    if terminates:
        beyond = torch.zeros(2)
    else:
        assert buffer.next_values[:, -1].tolist() == pytest.approx(beyond.tolist(), abs=1e-6)
    b = buffer
    found = gae(b.rewards, b.values, b.next_values, b.terminated, b.ended, gamma=0.9, lam=0.8)
    for row in range(2):
        v, r = [*buffer.values[row].tolist(), beyond[row].item()], buffer.rewards[row].tolist()
        deltas = [r[step] + 0.9 * v[step + 1] - v[step] for step in range(3)]
        last, middle = deltas[2], deltas[1] + 0.72 * deltas[2]
        first = deltas[0] + 0.72 * middle
        assert found[row].tolist() == pytest.approx([first, middle, last], abs=1e-6)


def test_reward_is_stored_in_the_rollout_buffer_at_the_step_of_its_action() -> None:
    # The Rent oracle gives reward 1 for each of the first two seeds and −2 for the third.
    _, buffer = roll(Rent, num_envs=16)
    planted = buffer.actions[..., Head.OP] == OP_GERMINATE
    count = planted.long().cumsum(dim=1)
    expected = torch.where(planted, torch.where(count <= 2, 1.0, -2.0), 0.0)
    assert torch.equal(buffer.rewards, expected)
    assert count.max() == 3


def test_rollouts_are_reproducible_from_the_rng_seed() -> None:
    policy = new_policy(TINY, 0)
    first, again, other = (
        collect(Lifecycle(seed, range(4)), policy, ActionStreams(seed, range(4))) for seed in (1, 1, 2)
    )
    assert torch.equal(first.actions, again.actions)
    assert torch.equal(first.rewards, again.rewards)
    assert not torch.equal(first.actions, other.actions)


class Counting(Rent):
    """Environment whose reward at every step is the index of the environment."""

    def rewards(self, actions: np.ndarray) -> np.ndarray:
        super().rewards(actions)
        return np.arange(self.num_envs, dtype=np.float64)


def test_evaluate_returns_the_sum_of_rewards_of_one_episode() -> None:
    returns = evaluate(Counting(0, range(3)), new_policy(TINY, 0))
    assert returns.tolist() == [0.0, 6.0, 12.0]  # Environment e has reward e in each of 6 steps.


@pytest.mark.parametrize(
    ("oracle", "expected", "deviation"),
    [
        (Memory, 1 / 3, 0.47),
        (Distractors, 8 / 4 / 3, 0.78),  # In each of 8 steps, 1 of 12 pairs of op and slot has reward 1.
    ],
)
def test_random_return_of_an_oracle_equals_the_expected_return_of_uniform_actions(
    oracle: type[ToyOracle], expected: float, deviation: float
) -> None:
    found = random_return(oracle, rng_seed=0, num_envs=900)
    assert found == pytest.approx(expected, abs=3 * deviation / 30)
