"""Learning-rate schedules at given points of the training."""

import pytest

from esper.kasmina.schedules import cosine_rate, wsd_factor


@pytest.mark.parametrize(
    ("progress", "rate"),
    [(-1.0, 2.0), (0.0, 2.0), (1 / 3, 1.5), (0.5, 1.0), (2 / 3, 0.5), (1.0, 0.0), (3.0, 0.0)],
)
def test_cosine_learning_rate_falls_from_its_base_value_to_zero(progress: float, rate: float) -> None:
    assert cosine_rate(2.0, progress) == pytest.approx(rate, abs=1e-12)


@pytest.mark.parametrize(
    ("progress", "minibatch", "warmup", "factor"),
    [
        (0.0, 0, 0, 1.0),
        # With a warmup of three minibatches the factor is 1/4, 2/4, 3/4, then 1.
        (0.0, 0, 3, 0.25),
        (0.1, 2, 3, 0.75),
        (0.1, 3, 3, 1.0),
        (0.8, 99, 3, 1.0),
        # At 0.9 of the training half of the decay over the last fifth is done.
        (0.9, 99, 3, 0.5),
        # A new seed has its own warmup; the smaller of warmup and decay factor is used.
        (0.9, 0, 3, 0.25),
        (1.0, 99, 3, 0.0),
        (1.1, 99, 3, 0.0),
    ],
)
def test_wsd_factor_rises_in_the_warmup_and_falls_in_the_last_fifth(
    progress: float, minibatch: int, warmup: int, factor: float
) -> None:
    assert wsd_factor(progress, minibatch, warmup) == pytest.approx(factor, abs=1e-12)
