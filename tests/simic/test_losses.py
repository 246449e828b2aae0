import math

import pytest
import torch
from torch import Tensor

from esper.simic.losses import (
    HEAD_ENTROPY_WEIGHTS,
    approximate_kl,
    closing_penalty,
    entropy_bonus,
    policy_loss,
    value_loss,
)


def log_probs_of(*ratios: float, head: int = 0) -> Tensor:
    """Return new log-probabilities ``[env, step, head]`` of decisions whose old log-probability is −1.

    The log-probability of one head is log(ratio) − 1 in each step, that of all other heads is 0.
    """
    logs = torch.zeros(1, len(ratios), 8)
    logs[0, :, head] = torch.tensor(ratios).log() - 1.0
    return logs


def old(steps: int, *heads: int) -> Tensor:
    """Return old log-probabilities ``[env, step, head]``: −1 in the given heads, 0 in all other heads."""
    logs = torch.zeros(1, steps, 8)
    logs[..., list(heads or (0,))] = -1.0
    return logs


@pytest.mark.parametrize(
    ("ratio", "advantage", "gain", "slope"),
    [
        (1.1, 1.0, 1.1, 1.1),
        (1.5, 1.0, 1.2, 0.0),  # The ratio of an action with a positive advantage is clipped at 1.2.
        (1.5, -1.0, -1.5, -1.5),  # A ratio above 1 of an action with a negative advantage is not clipped.
        (0.5, 1.0, 0.5, 0.5),
        (0.5, -1.0, -0.8, 0.0),  # The ratio of an action with a negative advantage is clipped at 0.8.
        (0.9, -2.0, -1.8, -1.8),
    ],
)
def test_ppo_surrogate_is_the_minimum_of_clipped_and_unclipped_ratio_times_advantage(
    ratio: float, advantage: float, gain: float, slope: float
) -> None:
    log_probs = log_probs_of(ratio).requires_grad_()
    result = policy_loss(log_probs, old(1), torch.tensor([[advantage]]), clip=0.2, rows=1)
    assert result.loss.item() == pytest.approx(-gain)
    assert result.log_ratio.item() == pytest.approx(math.log(ratio))
    result.loss.backward()
    assert log_probs.grad is not None
    assert log_probs.grad[0, 0, 0].item() == pytest.approx(-slope)


def test_policy_loss_is_a_sum_over_steps_divided_by_the_given_number_of_steps() -> None:
    # Clipped surrogates 1.2, −1.5, 0.5, −0.8 have the sum −0.6.
    log_probs = log_probs_of(1.5, 1.5, 0.5, 0.5)
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    assert policy_loss(log_probs, old(4), advantages, clip=0.2, rows=10).loss.item() == pytest.approx(0.06)


def two_heads() -> Tensor:
    """Return new log-probabilities whose ratio to the old is 1.5 in head 0 and 0.6 in head 3."""
    logs = log_probs_of(1.5)
    logs[0, 0, 3] = math.log(0.6) - 1.0
    return logs


def test_probability_ratio_of_an_action_is_the_product_of_the_ratios_of_its_heads() -> None:
    result = policy_loss(two_heads(), old(1, 0, 3), torch.ones(1, 1), clip=0.2, rows=1)
    assert result.log_ratio.exp().item() == pytest.approx(0.9)
    assert result.loss.item() == pytest.approx(-0.9)


def test_policy_loss_with_per_head_is_the_sum_of_clipped_surrogates_of_heads_that_the_op_reads() -> None:
    # Clipped surrogates of two heads: min(1.5, 1.2) + min(0.6, 0.8) = 1.8; heads that are not read add 0.
    result = policy_loss(two_heads(), old(1, 0, 3), torch.ones(1, 1), clip=0.2, rows=1, per_head=True)
    assert result.loss.item() == pytest.approx(-1.8)
    assert result.log_ratio.exp().item() == pytest.approx(0.9), (
        "the ratio that is reported stays the joint one"
    )


@pytest.mark.parametrize(
    ("value", "before", "target", "clip", "expected"),
    [
        (2.0, 1.0, 1.2, None, 0.32),  # Value loss is half the squared error: 0.8² / 2.
        # The unclipped error 0.8 exceeds the error 0.3 of the value that is clipped to 1.5.
        (2.0, 1.0, 1.2, 0.5, 0.32),
        # The error 0.8 of the value that is clipped to 0.2 exceeds the unclipped error 0.
        (1.0, 0.0, 1.0, 0.2, 0.32),
        (-1.0, 0.0, -1.0, 0.2, 0.32),
        # The value changes by 0.1, which is within the clipping range, so its error is 0.6.
        (1.1, 1.0, 0.5, 0.2, 0.18),
    ],
)
def test_value_loss_is_half_the_larger_of_clipped_and_unclipped_squared_error(
    value: float, before: float, target: float, clip: float | None, expected: float
) -> None:
    tensors = (torch.tensor([[x]]) for x in (value, before, target))
    assert value_loss(*tensors, clip=clip, rows=1).item() == pytest.approx(expected)


def test_value_loss_is_a_sum_over_steps_divided_by_the_given_number_of_steps() -> None:
    loss = value_loss(torch.ones(2, 2), torch.zeros(2, 2), torch.zeros(2, 2), clip=None, rows=8)
    assert loss.item() == pytest.approx(0.25)


def test_entropy_bonus_is_the_weighted_sum_of_entropies_of_heads_with_several_legal_values() -> None:
    assert HEAD_ENTROPY_WEIGHTS == (1.0, 1.0, 1.5, 1.2, 1.5, 1.2, 1.3, 1.3)
    entropies = torch.full((1, 2, 8), 0.5)
    choice = torch.zeros(1, 2, 8, dtype=torch.bool)
    choice[0, 0, 0] = choice[0, 0, 2] = choice[0, 1, 7] = True
    # Three heads with several legal values have entropy 0.5 and weights 1.0, 1.5 and 1.3; the entropy bonus
    # is 0.5 · (1.0 + 1.5 + 1.3) divided by 4 steps.
    assert entropy_bonus(entropies, choice, rows=4).item() == pytest.approx(0.475)


def test_entropy_penalty_applies_to_blueprint_and_tempo_entropies_below_the_floor() -> None:
    entropies = torch.full((1, 2, 8), 0.3, requires_grad=True)
    choice = torch.ones(1, 2, 8, dtype=torch.bool)
    choice[0, 1, 4] = False
    penalty = closing_penalty(entropies, choice, floor=0.5, rows=4)
    # The entropy is 0.2 below the floor in two steps of the blueprint head and in one step of the tempo head.
    assert penalty.item() == pytest.approx(0.15)
    penalty.backward()
    assert entropies.grad is not None
    assert entropies.grad[0].nonzero().tolist() == [[0, 2], [0, 4], [1, 2]]
    assert closing_penalty(entropies, choice, floor=0.3, rows=4).item() == 0.0


def test_entropy_penalty_with_a_floor_of_0_has_zero_gradient() -> None:
    entropies = torch.full((1, 1, 8), -1e-7, requires_grad=True)
    penalty = closing_penalty(entropies, torch.ones(1, 1, 8, dtype=torch.bool), floor=0.0, rows=1)
    penalty.backward()
    assert penalty.item() == 0.0
    assert entropies.grad is not None
    assert not entropies.grad.any()


@pytest.mark.parametrize(
    ("ratio", "kl"), [(1.0, 0.0), (2.0, 1.0 - math.log(2.0)), (0.5, math.log(2.0) - 0.5)]
)
def test_kl_estimate_is_never_negative(ratio: float, kl: float) -> None:
    assert approximate_kl(torch.tensor(math.log(ratio))).item() == pytest.approx(kl, abs=1e-7)
