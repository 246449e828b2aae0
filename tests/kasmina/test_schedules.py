"""Learning-rate schedules as functions of the elapsed fraction of the training."""

import pytest

from esper.kasmina.optimizer_groups import cosine_rate, wsd_factor


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
        # With a warmup of three minibatches the learning-rate factor is 1/4, 2/4, 3/4, then 1.
        (0.0, 0, 3, 0.25),
        (0.1, 2, 3, 0.75),
        (0.1, 3, 3, 1.0),
        (0.8, 99, 3, 1.0),
        # At progress 0.9, half of the linear decay over the last fifth of the training is done.
        (0.9, 99, 3, 0.5),
        # A seed planted late has its own warmup; its learning-rate factor is the smaller of warmup and decay
        # factor.
        (0.9, 0, 3, 0.25),
        (1.0, 99, 3, 0.0),
        (1.1, 99, 3, 0.0),
    ],
)
def test_warmup_stable_decay_factor_rises_during_warmup_and_falls_in_the_last_fifth_of_the_training(
    progress: float, minibatch: int, warmup: int, factor: float
) -> None:
    assert wsd_factor(progress, minibatch, warmup) == pytest.approx(factor, abs=1e-12)
