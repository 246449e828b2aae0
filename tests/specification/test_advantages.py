import pytest
import torch
from torch import Tensor

from esper.simic.advantages import gae, normalise

NEVER = [False, False, False]


def advantages(
    rewards: list[float],
    values: list[float],
    next_values: list[float],
    terminated: list[bool],
    ended: list[bool],
    gamma: float = 0.5,
    lam: float = 0.5,
) -> list[float]:
    rows = (torch.tensor([row]) for row in (rewards, values, next_values, terminated, ended))
    return gae(*rows, gamma=gamma, lam=lam)[0].tolist()


def test_gae_is_the_discounted_sum_of_td_errors() -> None:
    # TD error = reward + 1/2 · next value − value: 1 + 1/2 − 1 = 0.5, 2 + 1/2 − 1 = 1.5, 3 + 2/2 − 1 = 3.
    # An advantage is its TD error plus gamma · lambda = 1/4 of the next advantage.
    found = advantages([1.0, 2.0, 3.0], [1.0, 1.0, 1.0], [1.0, 1.0, 2.0], NEVER, NEVER)
    assert found == pytest.approx([1.0625, 2.25, 3.0])


def test_gae_of_a_terminated_episode_does_not_bootstrap_from_the_next_value() -> None:
    # Terminated step 1: TD error and advantage are reward 2 − value 1 = 1, without bootstrap.
    # Advantage of step 0: TD error 0.5 plus 1/4 of the advantage 1 of step 1.
    middle = [False, True, False]
    found = advantages([1.0, 2.0, 3.0], [1.0, 1.0, 1.0], [1.0, 9.0, 2.0], middle, middle)
    assert found == pytest.approx([0.75, 1.0, 3.0])


def test_gae_of_a_truncated_episode_bootstraps_from_the_value_of_its_last_state() -> None:
    # Truncated step 1: TD error and advantage are reward 2 + gamma 1/2 · next value 4 − value 1 = 3.
    # Advantage of step 0: TD error 0.5 plus 1/4 of the advantage 3 of step 1.
    found = advantages([1.0, 2.0, 3.0], [1.0, 1.0, 1.0], [1.0, 4.0, 2.0], NEVER, [False, True, False])
    assert found == pytest.approx([1.25, 3.0, 3.0])


def test_gae_with_gamma_1_and_lambda_1_is_the_sum_of_future_rewards_minus_the_value() -> None:
    end = [False, False, True]
    values = [0.3, -0.7, 0.2]
    found = advantages([1.0, 2.0, 4.0], values, [-0.7, 0.2, 9.0], end, end, gamma=1.0, lam=1.0)
    assert [a + v for a, v in zip(found, values, strict=True)] == pytest.approx([7.0, 6.0, 4.0])


def random_rows(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    rewards, values, next_values = (torch.randn(3, 8, generator=generator) for _ in range(3))
    return rewards, values, next_values


@pytest.mark.parametrize("terminates", [True, False])
def test_advantages_of_an_episode_do_not_depend_on_the_next_episode(terminates: bool) -> None:
    rewards, values, next_values = random_rows(torch.Generator().manual_seed(0))
    ended = torch.zeros(3, 8, dtype=torch.bool)
    ended[0, 3] = ended[1, 5] = True
    terminated = ended & terminates
    before = gae(rewards, values, next_values, terminated, ended, gamma=0.9, lam=0.9)
    rewards[0, 4:] += 10.0
    values[0, 4:] += 10.0
    after = gae(rewards, values, next_values, terminated, ended, gamma=0.9, lam=0.9)
    assert torch.equal(before[0, :4], after[0, :4])
    assert torch.equal(before[1:], after[1:]), "environments are independent"
    rewards[1, 5] += 1.0
    final = gae(rewards, values, next_values, terminated, ended, gamma=0.9, lam=0.9)
    assert (final[1, :6] > after[1, :6]).all(), "within an episode it changes all earlier steps"


def test_normalised_advantages_have_mean_0_and_std_1_over_steps_with_several_legal_actions() -> None:
    # Advantages 1, 3, 5 of the steps with several legal actions have mean 3 and variance 8/3.
    # Advantages of forced decisions do not enter mean and variance and are set to 0.
    advantages = torch.tensor([[1.0, 100.0, 3.0], [5.0, -100.0, 7.0]])
    free = torch.tensor([[True, False, True], [True, False, False]])
    step = (3.0 / 8.0) ** 0.5 * 2.0
    expected = torch.tensor([[-step, 0.0, 0.0], [step, 0.0, 0.0]])
    torch.testing.assert_close(normalise(advantages, free), expected)


def test_equal_advantages_normalise_to_zero() -> None:
    assert normalise(torch.full((2, 2), 5.0), torch.ones(2, 2, dtype=torch.bool)).tolist() == [[0.0, 0.0]] * 2


def test_normalised_advantages_are_zero_if_every_step_has_a_single_legal_action() -> None:
    assert normalise(torch.randn(2, 2), torch.zeros(2, 2, dtype=torch.bool)).tolist() == [[0.0, 0.0]] * 2
