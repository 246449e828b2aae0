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
    """``[1, step, 8]`` with the given ratio to an old log-probability of −1 in one head."""
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
        (1.5, 1.0, 1.2, 0.0),  # enough of a good thing
        (1.5, -1.0, -1.5, -1.5),  # a bad action that became likelier is always pushed back
        (0.5, 1.0, 0.5, 0.5),
        (0.5, -1.0, -0.8, 0.0),  # enough of a bad thing avoided
        (0.9, -2.0, -1.8, -1.8),
    ],
)
def test_the_surrogate_is_clipped_where_that_is_worse(
    ratio: float, advantage: float, gain: float, slope: float
) -> None:
    log_probs = log_probs_of(ratio).requires_grad_()
    result = policy_loss(log_probs, old(1), torch.tensor([[advantage]]), clip=0.2, rows=1)
    assert result.loss.item() == pytest.approx(-gain)
    assert result.log_ratio.item() == pytest.approx(math.log(ratio))
    result.loss.backward()
    assert log_probs.grad is not None
    assert log_probs.grad[0, 0, 0].item() == pytest.approx(-slope)


def test_the_loss_is_a_sum_over_rows_divided_by_the_number_given() -> None:
    # gains 1.2, −1.5, 0.5, −0.8: sum −0.6
    log_probs = log_probs_of(1.5, 1.5, 0.5, 0.5)
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    assert policy_loss(log_probs, old(4), advantages, clip=0.2, rows=10).loss.item() == pytest.approx(0.06)


def two_heads() -> Tensor:
    """Head 0 became 1.5 times as likely, head 3 0.6 times: jointly 0.9 times."""
    logs = log_probs_of(1.5)
    logs[0, 0, 3] = math.log(0.6) - 1.0
    return logs


def test_the_joint_ratio_is_the_product_over_heads() -> None:
    result = policy_loss(two_heads(), old(1, 0, 3), torch.ones(1, 1), clip=0.2, rows=1)
    assert result.log_ratio.exp().item() == pytest.approx(0.9)
    assert result.loss.item() == pytest.approx(-0.9)


def test_clipped_head_by_head_the_surrogates_of_the_heads_read_are_added() -> None:
    # min(1.5, 1.2) + min(0.6, 0.8) = 1.8; the six heads that were not read add nothing.
    result = policy_loss(two_heads(), old(1, 0, 3), torch.ones(1, 1), clip=0.2, rows=1, per_head=True)
    assert result.loss.item() == pytest.approx(-1.8)
    assert result.log_ratio.exp().item() == pytest.approx(0.9), (
        "the ratio that is reported stays the joint one"
    )


@pytest.mark.parametrize(
    ("value", "before", "target", "clip", "expected"),
    [
        (2.0, 1.0, 1.2, None, 0.32),  # 0.8² / 2
        (2.0, 1.0, 1.2, 0.5, 0.32),  # clipped to 1.5: 0.3² is less, the worse counts
        (1.0, 0.0, 1.0, 0.2, 0.32),  # clipped to 0.2: 0.8² is worse than 0
        (-1.0, 0.0, -1.0, 0.2, 0.32),
        (1.1, 1.0, 0.5, 0.2, 0.18),  # within the clip: 0.6² / 2
    ],
)
def test_the_value_loss_is_half_the_worse_squared_error(
    value: float, before: float, target: float, clip: float | None, expected: float
) -> None:
    tensors = (torch.tensor([[x]]) for x in (value, before, target))
    assert value_loss(*tensors, clip=clip, rows=1).item() == pytest.approx(expected)


def test_the_value_loss_is_divided_by_the_number_of_rows_given() -> None:
    loss = value_loss(torch.ones(2, 2), torch.zeros(2, 2), torch.zeros(2, 2), clip=None, rows=8)
    assert loss.item() == pytest.approx(0.25)


def test_entropy_is_weighted_by_head_and_counts_where_there_was_a_choice() -> None:
    assert HEAD_ENTROPY_WEIGHTS == (1.0, 1.0, 1.5, 1.2, 1.5, 1.2, 1.3, 1.3)
    entropies = torch.full((1, 2, 8), 0.5)
    choice = torch.zeros(1, 2, 8, dtype=torch.bool)
    choice[0, 0, 0] = choice[0, 0, 2] = choice[0, 1, 7] = True
    # 0.5 · (1.0 + 1.5 + 1.3) / 4
    assert entropy_bonus(entropies, choice, rows=4).item() == pytest.approx(0.475)


def test_only_an_open_head_below_the_floor_is_pulled_back() -> None:
    entropies = torch.full((1, 2, 8), 0.3, requires_grad=True)
    choice = torch.ones(1, 2, 8, dtype=torch.bool)
    choice[0, 1, 4] = False
    penalty = closing_penalty(entropies, choice, floor=0.5, rows=4)
    # blueprint twice and tempo once lack 0.2 each
    assert penalty.item() == pytest.approx(0.15)
    penalty.backward()
    assert entropies.grad is not None
    assert entropies.grad[0].nonzero().tolist() == [[0, 2], [0, 4], [1, 2]]
    assert closing_penalty(entropies, choice, floor=0.3, rows=4).item() == 0.0


def test_without_a_floor_a_closed_head_is_left_alone_to_the_bit() -> None:
    entropies = torch.full((1, 1, 8), -1e-7, requires_grad=True)
    penalty = closing_penalty(entropies, torch.ones(1, 1, 8, dtype=torch.bool), floor=0.0, rows=1)
    penalty.backward()
    assert penalty.item() == 0.0
    assert entropies.grad is not None
    assert not entropies.grad.any()


@pytest.mark.parametrize(
    ("ratio", "kl"), [(1.0, 0.0), (2.0, 1.0 - math.log(2.0)), (0.5, math.log(2.0) - 0.5)]
)
def test_the_divergence_estimate_is_never_negative(ratio: float, kl: float) -> None:
    assert approximate_kl(torch.tensor(math.log(ratio))).item() == pytest.approx(kl, abs=1e-7)
