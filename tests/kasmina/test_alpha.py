"""Alpha curves, and ramps of alpha over epochs."""

from itertools import pairwise, product

import pytest

from esper.kasmina import lifecycle
from esper.leyline import ALPHA_SPEED_EPOCHS, AlphaCurve, SlotTable, Stage

EVERY_RAMP = list(product(AlphaCurve, ALPHA_SPEED_EPOCHS))

# Expected values of each alpha curve at x = 1/4 and x = 0.4, where x is the elapsed fraction of a ramp from 0
# to 1. With the logistic function σ, a sigmoid curve of steepness k has the value (σ(k(x − ½)) − σ(−k/2)) /
# (σ(k/2) − σ(−k/2)) at x.
VALUES = {
    AlphaCurve.LINEAR: (0.25, 0.4),
    # Cosine curve at x = 1/4: (1 − cos(π/4)) / 2; at x = 0.4: (1 − cos(0.4π)) / 2.
    AlphaCurve.COSINE: (0.1464466, 0.3454915),
    # Sigmoid curve of steepness 6 at x = 1/4: (0.182426 − 0.047426) / 0.905148.
    AlphaCurve.SIGMOID_GENTLE: (0.1491464, 0.3390802),
    # Sigmoid curve of steepness 12 at x = 1/4: (0.047426 − 0.002473) / 0.995055.
    AlphaCurve.SIGMOID: (0.0451766, 0.2301407),
    # Sigmoid curve of steepness 24 at x = 1/4: (0.002473 − 0.000006) / 0.999988.
    AlphaCurve.SIGMOID_SHARP: (0.0024665, 0.0831676),
}


@pytest.mark.parametrize("curve", AlphaCurve)
def test_alpha_curve_rises_from_0_to_1_through_values_computed_by_hand(curve: AlphaCurve) -> None:
    assert [lifecycle.curve_value(curve, progress) for progress in (-1.0, 0.0, 1.0, 2.0)] == [
        0.0,
        0.0,
        1.0,
        1.0,
    ]
    assert lifecycle.curve_value(curve, 0.5) == pytest.approx(0.5, abs=1e-12)
    found = (lifecycle.curve_value(curve, 0.25), lifecycle.curve_value(curve, 0.4))
    assert found == pytest.approx(VALUES[curve], abs=1e-6)


def ramp(curve: AlphaCurve, epochs: int, start: float, target: float) -> list[float]:
    """Return the alpha of a seed in each epoch of one ramp."""
    table = SlotTable.empty(1, 1)
    table.stage[0, 0] = Stage.BLENDING
    table.alpha[0, 0] = start
    lifecycle.aim(table, 0, 0, target, epochs, curve)
    lifecycle.begin_ramp(table, 0, 0)
    seen = [float(table.alpha[0, 0])]
    while table.ramping[0, 0]:
        lifecycle.tick_ramp(table, 0, 0)
        seen.append(float(table.alpha[0, 0]))
    return seen


@pytest.mark.parametrize(("curve", "epochs"), EVERY_RAMP)
@pytest.mark.parametrize(("start", "target"), [(0.0, 1.0), (0.0, 0.5), (0.5, 0.7), (1.0, 0.7), (1.0, 0.0)])
def test_alpha_ramp_is_monotonic_lasts_the_given_epochs_and_ends_exactly_at_its_target(
    curve: AlphaCurve, epochs: int, start: float, target: float
) -> None:
    seen = ramp(curve, epochs, start, target)
    assert len(seen) == max(epochs, 1), "an INSTANT ramp ends in its first epoch"
    assert seen[-1] == target
    rising = 1 if target > start else -1
    assert all(rising * low < rising * high for low, high in pairwise([start, *seen]))


def test_alpha_in_each_epoch_of_a_ramp_equals_a_value_computed_by_hand() -> None:
    assert ramp(AlphaCurve.LINEAR, 3, 0.0, 1.0) == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert ramp(AlphaCurve.LINEAR, 5, 0.5, 1.0) == pytest.approx([0.6, 0.7, 0.8, 0.9, 1.0])
    # A cosine ramp over three epochs has alpha (1 − cos(π/3)) / 2 = 0.25 in the first epoch.
    assert ramp(AlphaCurve.COSINE, 3, 0.0, 1.0) == pytest.approx([0.25, 0.75, 1.0])
    assert ramp(AlphaCurve.COSINE, 3, 1.0, 0.5) == pytest.approx([0.875, 0.625, 0.5])
    assert ramp(AlphaCurve.SIGMOID_SHARP, 0, 0.3, 0.7) == [0.7]
    assert ramp(AlphaCurve.LINEAR, 8, 0.7, 0.7) == [0.7], "a ramp to the present alpha lasts one epoch"
