import numpy as np
import pytest
import torch

from esper.leyline import OP_GERMINATE, Head
from esper.simic.training.lifecycle_sandbox import Lifecycle
from esper.simic.training.proving import new_policy, random_return, uniform_actions
from esper.simic.training.rollout import ActionStreams, evaluate
from esper.simic.training.sandbox import Distractors, Memory, Rent, Sandbox
from tests.simic.rolling import TINY, roll


def test_every_environments_random_numbers_are_its_own() -> None:
    alone, among = ActionStreams(5, [3]), ActionStreams(5, [0, 3, 7])
    first, second = among.draw(), among.draw()
    assert first.shape == (3, 8)
    assert torch.equal(alone.draw()[0], first[1])
    assert torch.equal(alone.draw()[0], second[1])
    assert len(torch.cat([first, second]).unique(dim=0)) == 6
    assert not torch.equal(ActionStreams(6, [3]).draw(), ActionStreams(5, [3]).draw())
    assert not torch.equal(ActionStreams(5, [3], episode=1).draw(), ActionStreams(5, [3]).draw())


def test_a_rollout_is_whole_episodes_that_terminate_at_the_horizon() -> None:
    _, buffer = roll(Rent, episodes=2)
    ends = [False] * 5 + [True]
    assert buffer.ended.tolist() == [ends * 2] * 4
    assert buffer.terminated.tolist() == [ends * 2] * 4
    starts = [True] + [False] * 5
    assert buffer.fresh.tolist() == [starts * 2] * 4
    assert buffer.length == 12


def test_the_value_reached_by_a_step_is_the_value_seen_at_the_next() -> None:
    _, buffer = roll(Rent, episodes=2)
    assert torch.equal(buffer.next_values[:, :-1], buffer.values[:, 1:])
    assert buffer.next_values[:, -1].tolist() == [0.0] * 4
    assert buffer.values.unique().numel() > 4


def test_rewards_and_actions_stand_in_the_same_row() -> None:
    # Rent pays 1 for each of the first two seeds and takes 2 for the third.
    _, buffer = roll(Rent, num_envs=16)
    planted = buffer.actions[..., Head.OP] == OP_GERMINATE
    count = planted.long().cumsum(dim=1)
    expected = torch.where(planted, torch.where(count <= 2, 1.0, -2.0), 0.0)
    assert torch.equal(buffer.rewards, expected)
    assert count.max() == 3


def test_rollouts_repeat_from_their_rng_seed() -> None:
    (_, first), (_, again), (_, other) = (roll(Lifecycle, rng_seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.actions, again.actions)
    assert torch.equal(first.rewards, again.rewards)
    assert not torch.equal(first.actions, other.actions)


class Counting(Rent):
    """Pays 1 for every step of the episode that is being evaluated."""

    def judge(self, actions: np.ndarray) -> np.ndarray:
        super().judge(actions)
        return np.arange(self.num_envs, dtype=np.float64)


def test_an_evaluation_sums_the_rewards_of_one_episode() -> None:
    returns = evaluate(Counting(0, range(3)), new_policy(TINY, 0))
    assert returns.tolist() == [0.0, 6.0, 12.0]  # horizon 6


def test_evaluations_are_argmax_and_repeat() -> None:
    policy = new_policy(TINY, 0)
    first, second = (evaluate(Distractors(3, range(8)), policy) for _ in range(2))
    assert first.tolist() == second.tolist()


@pytest.mark.parametrize(
    ("oracle", "expected", "deviation"),
    [
        (Memory, 1 / 3, 0.47),
        (Distractors, 8 / 4 / 3, 0.78),  # one op of four, one slot of three, eight times
    ],
)
def test_chance_is_uniform_over_legal_actions(
    oracle: type[Sandbox], expected: float, deviation: float
) -> None:
    found = random_return(oracle, rng_seed=0, num_envs=900)
    assert found == pytest.approx(expected, abs=3 * deviation / 30)


def test_uniform_actions_choose_the_op_first_and_then_among_its_slots() -> None:
    env = Rent(0, range(1000))
    actions = uniform_actions(env.reset().masks, ActionStreams(0, range(1000)).draw())
    assert torch.bincount(actions[:, Head.OP]).tolist() == pytest.approx([500, 500], abs=60)
    slots = actions[actions[:, Head.OP] == OP_GERMINATE, Head.SLOT]
    assert (torch.bincount(slots) / len(slots)).tolist() == pytest.approx([1 / 3] * 3, abs=0.07)
