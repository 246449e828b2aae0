import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.tamiyo.policy.distributions import EmptyMaskError, MaskedCategorical

LOGITS = torch.tensor([math.log(1.0), math.log(2.0), math.log(3.0), math.log(6.0)])
MASK = torch.tensor([True, False, True, True])
# The legal values have weights 1, 3, 6 and thus probabilities 0.1, 0.3, 0.6.


def test_probabilities_are_normalised_over_legal_values() -> None:
    distribution = MaskedCategorical(LOGITS, MASK)
    assert distribution.probs.tolist() == pytest.approx([0.1, 0.0, 0.3, 0.6])
    assert distribution.probs[1] == 0.0
    assert distribution.log_prob(torch.tensor(2)).item() == pytest.approx(math.log(0.3))
    assert distribution.mode.item() == 3


def test_entropy_is_normalised_by_the_number_of_legal_values() -> None:
    raw = -(0.1 * math.log(0.1) + 0.3 * math.log(0.3) + 0.6 * math.log(0.6))
    assert MaskedCategorical(LOGITS, MASK).entropy().item() == pytest.approx(raw / math.log(3))


@pytest.mark.parametrize("legal", [2, 3, 4])
def test_uniform_distribution_has_normalised_entropy_1(legal: int) -> None:
    mask = torch.arange(4) < legal
    assert MaskedCategorical(torch.full((4,), 7.0), mask).entropy().item() == pytest.approx(1.0)


def test_single_legal_value_has_zero_entropy_log_prob_and_gradient() -> None:
    logits = torch.tensor([5.0, -3.0, 0.5], requires_grad=True)
    distribution = MaskedCategorical(logits, torch.tensor([False, True, False]))
    log_prob, entropy = distribution.log_prob(torch.tensor(1)), distribution.entropy()
    assert (log_prob.item(), entropy.item(), distribution.has_choice.item()) == (0.0, 0.0, False)
    (log_prob + entropy).backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("uniform", "value"),
    [
        (0.0, 0),
        (0.05, 0),
        (0.1 + 1e-6, 2),
        (0.39, 2),
        (0.41, 3),
        (1.0 - 2.0**-24, 3),  # Largest number that torch.rand returns.
    ],
)
def test_sample_is_the_smallest_value_whose_cumulative_probability_exceeds_the_uniform_number(
    uniform: float, value: int
) -> None:
    assert MaskedCategorical(LOGITS, MASK).sample(torch.tensor(uniform)).item() == value


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-24])
@pytest.mark.parametrize("legal", range(4))
def test_single_legal_value_is_always_sampled(uniform: float, legal: int) -> None:
    mask = torch.arange(4) == legal
    assert MaskedCategorical(LOGITS, mask).sample(torch.tensor(uniform)).item() == legal


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.1, 3.0, 40.0, 3e4]))
def test_masked_values_are_never_sampled(rng_seed: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(rng_seed)
    logits = spread * torch.randn(64, 5, generator=generator)
    mask = torch.rand(64, 5, generator=generator) < 0.5
    mask[:, 0] |= ~mask.any(dim=-1)
    uniform = torch.rand(64, generator=generator)
    uniform[:2] = torch.tensor([0.0, 1.0 - 2.0**-24])
    distribution = MaskedCategorical(logits, mask)
    rows = torch.arange(64)
    assert mask[rows, distribution.sample(uniform)].all()
    assert mask[rows, distribution.mode].all()
    assert (distribution.probs[~mask] == 0.0).all()


def test_sample_frequencies_equal_the_probabilities() -> None:
    uniform = (torch.arange(1000) + 0.5) / 1000
    drawn = MaskedCategorical(LOGITS.expand(1000, 4), MASK.expand(1000, 4)).sample(uniform)
    assert torch.bincount(drawn, minlength=4).tolist() == [100, 0, 300, 600]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_logits_of_any_precision_are_evaluated_in_float32(dtype: torch.dtype) -> None:
    distribution = MaskedCategorical(LOGITS.to(dtype), MASK)
    assert distribution.log_probs.dtype == torch.float32
    assert distribution.probs.tolist() == pytest.approx([0.1, 0.0, 0.3, 0.6], abs=3e-3)
    assert torch.isfinite(distribution.log_probs.half()).all()
    assert torch.isfinite(distribution.entropy())


def test_gradients_of_masked_categorical_are_finite_and_zero_for_masked_logits() -> None:
    logits = LOGITS.clone().requires_grad_()
    distribution = MaskedCategorical(logits, MASK)
    (distribution.log_prob(torch.tensor(0)) + distribution.entropy()).backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[1] == 0.0
    assert (logits.grad[MASK] != 0.0).all()


def test_masked_categorical_without_a_legal_value_raises_with_the_index_of_the_row() -> None:
    mask = torch.ones(2, 3, 4, dtype=torch.bool)
    mask[1, 2] = False
    with pytest.raises(EmptyMaskError, match=r"row \[1, 2\]"):
        MaskedCategorical(torch.zeros(2, 3, 4), mask)
