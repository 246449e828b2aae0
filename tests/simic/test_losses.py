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
    """Return log-probabilities ``[1, step, 8]``: log(ratio) − 1 in one head, 0 in all other heads."""
    logs = torch.zeros(1, len(ratios), 8)
    logs[0, :, head] = torch.tensor(ratios).log() - 1.0
    return logs


def old(steps: int, *heads: int) -> Tensor:
    logs = torch.zeros(1, steps, 8)
    logs[..., list(heads or (0,))] = -1.0
    return logs


@pytest.mark.parametrize(
    ("ratio", "advantage", "gain", "slope"),
    [
        (1.1, 1.0, 1.1, 1.1),
        (1.5, 1.0, 1.2, 0.0),  # Ratio of an action with positive advantage is clipped at 1.2.
        (1.5, -1.0, -1.5, -1.5),  # A rising ratio at negative advantage is not clipped.
        (0.5, 1.0, 0.5, 0.5),
        (0.5, -1.0, -0.8, 0.0),  # Ratio of an action with negative advantage is clipped at 0.8.
        (0.9, -2.0, -1.8, -1.8),
    ],
)
def test_surrogate_is_the_minimum_of_clipped_and_unclipped_ratio_times_advantage(
    ratio: float, advantage: float, gain: float, slope: float
) -> None:
    log_probs = log_probs_of(ratio).requires_grad_()
    result = policy_loss(log_probs, old(1), torch.tensor([[advantage]]), clip=0.2, rows=1)
    assert result.loss.item() == pytest.approx(-gain)
    assert result.log_ratio.item() == pytest.approx(math.log(ratio))
    result.loss.backward()
    assert log_probs.grad is not None
    assert log_probs.grad[0, 0, 0].item() == pytest.approx(-slope)


def test_policy_loss_is_divided_by_the_given_number_of_rows() -> None:
    # Clipped surrogates 1.2, −1.5, 0.5, −0.8 have the sum −0.6.
    log_probs = log_probs_of(1.5, 1.5, 0.5, 0.5)
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    assert policy_loss(log_probs, old(4), advantages, clip=0.2, rows=10).loss.item() == pytest.approx(0.06)


def two_heads() -> Tensor:
    """Return log-probabilities with ratio 1.5 in head 0 and 0.6 in head 3; the joint ratio is 0.9."""
    logs = log_probs_of(1.5)
    logs[0, 0, 3] = math.log(0.6) - 1.0
    return logs


def test_joint_ratio_is_the_product_over_heads() -> None:
    result = policy_loss(two_heads(), old(1, 0, 3), torch.ones(1, 1), clip=0.2, rows=1)
    assert result.log_ratio.exp().item() == pytest.approx(0.9)
    assert result.loss.item() == pytest.approx(-0.9)


def test_per_head_clipping_adds_the_surrogates_of_heads_that_were_read() -> None:
    # Clipped surrogates of two heads: min(1.5, 1.2) + min(0.6, 0.8) = 1.8; heads that were not read add 0.
    result = policy_loss(two_heads(), old(1, 0, 3), torch.ones(1, 1), clip=0.2, rows=1, per_head=True)
    assert result.loss.item() == pytest.approx(-1.8)
    assert result.log_ratio.exp().item() == pytest.approx(0.9), (
        "the ratio that is reported stays the joint one"
    )


@pytest.mark.parametrize(
    ("value", "before", "target", "clip", "expected"),
    [
        (2.0, 1.0, 1.2, None, 0.32),  # Value loss is half the squared error: 0.8² / 2.
        (2.0, 1.0, 1.2, 0.5, 0.32),  # Error 0.8 exceeds the error 0.3 of the value clipped to 1.5.
        (1.0, 0.0, 1.0, 0.2, 0.32),  # Error 0.8 of the value clipped to 0.2 exceeds the unclipped error 0.
        (-1.0, 0.0, -1.0, 0.2, 0.32),
        (1.1, 1.0, 0.5, 0.2, 0.18),  # The value change 0.1 is within the clip, so the error is 0.6.
    ],
)
def test_value_loss_is_half_the_larger_of_clipped_and_unclipped_squared_error(
    value: float, before: float, target: float, clip: float | None, expected: float
) -> None:
    tensors = (torch.tensor([[x]]) for x in (value, before, target))
    assert value_loss(*tensors, clip=clip, rows=1).item() == pytest.approx(expected)


def test_value_loss_is_divided_by_the_given_number_of_rows() -> None:
    loss = value_loss(torch.ones(2, 2), torch.zeros(2, 2), torch.zeros(2, 2), clip=None, rows=8)
    assert loss.item() == pytest.approx(0.25)


def test_entropy_bonus_is_weighted_by_head_and_counts_rows_with_a_choice() -> None:
    assert HEAD_ENTROPY_WEIGHTS == (1.0, 1.0, 1.5, 1.2, 1.5, 1.2, 1.3, 1.3)
    entropies = torch.full((1, 2, 8), 0.5)
    choice = torch.zeros(1, 2, 8, dtype=torch.bool)
    choice[0, 0, 0] = choice[0, 0, 2] = choice[0, 1, 7] = True
    # Entropy 0.5 times the weights of three heads with a choice (1.0 + 1.5 + 1.3), over 4 rows.
    assert entropy_bonus(entropies, choice, rows=4).item() == pytest.approx(0.475)


def test_closing_penalty_applies_to_kept_open_heads_below_the_floor() -> None:
    entropies = torch.full((1, 2, 8), 0.3, requires_grad=True)
    choice = torch.ones(1, 2, 8, dtype=torch.bool)
    choice[0, 1, 4] = False
    penalty = closing_penalty(entropies, choice, floor=0.5, rows=4)
    # Entropy is 0.2 below the floor in two rows of the blueprint head and one row of the tempo head.
    assert penalty.item() == pytest.approx(0.15)
    penalty.backward()
    assert entropies.grad is not None
    assert entropies.grad[0].nonzero().tolist() == [[0, 2], [0, 4], [1, 2]]
    assert closing_penalty(entropies, choice, floor=0.3, rows=4).item() == 0.0


def test_closing_penalty_without_a_floor_has_zero_gradient() -> None:
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
