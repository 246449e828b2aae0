"""Successive halving and the choice by extrapolation, on made-up losses."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from esper.study import computed_arms
from esper.study.computed_arms import computed_arm, successive_halving, value_at
from esper.study.one_run import MarkResult

MARKS = tuple(2.0 ** (-half / 2) for half in range(12, -1, -1))
"""Marks at factors of the square root of two, from 1/64 to 1."""


def answers(loss: Callable[[float], float], marks: tuple[float, ...] = MARKS) -> list[MarkResult]:
    """Return results whose test loss is the validation loss plus 10."""
    return [
        MarkResult(mark, loss(mark), 10 + loss(mark), 50.0, 7, "", {"forward": 1}, 1, 1, False, 2.0)
        for mark in marks
    ]


def constant(*losses: float) -> dict[int, list[MarkResult]]:
    """Return results of sizes 1, 2, … whose losses do not depend on the compute."""
    return {size: answers(lambda mark, loss=loss: loss) for size, loss in enumerate(losses, start=1)}


def test_losses_are_interpolated_over_the_logarithm_of_compute_and_unknown_before_the_first_mark():
    own = answers(lambda mark: 1 - math.log2(mark), (0.25, 0.5, 1.0))
    assert [value_at(own, share) for share in (0.25, 0.5, 1.0)] == pytest.approx([3.0, 2.0, 1.0])
    assert value_at(own, math.sqrt(0.5)) == pytest.approx(1.5)
    assert value_at(own, 0.5, "test_loss") == pytest.approx(12.0)
    assert math.isnan(value_at(own, 0.2))


def test_successive_halving_stops_all_sizes_that_are_worse_than_half_of_those_before():
    # With four sizes, decisions are at 1/4 and at 1/2 of a full training. The first size that is tried runs
    # to its end, since it has no rival; a size that is worse than all before it stops after a quarter.
    for rng_seed in range(20):
        size, spent = successive_halving(constant(4.0, 3.0, 2.0, 1.0), 0.4, rng_seed)
        assert size == 4
        parts = np.array([0.1, 0.2, 0.4])
        possible = {round(0.4 + a + b + c, 9) for a in parts for b in parts for c in parts}
        assert round(spent, 9) in possible
    # Sizes of equal loss are all among the best, so all of them run to their ends.
    assert successive_halving(constant(1.0, 1.0), 0.4, 0)[1] == pytest.approx(0.8)


def test_successive_halving_continues_the_better_half_of_the_sizes_tried_so_far(
    monkeypatch: pytest.MonkeyPatch,
):
    runs = constant(4.0, 3.0, 2.0, 1.0)
    read: list[tuple[int, float]] = []

    def logged(results: list[MarkResult], share: float) -> float:
        read.append((next(size for size, own in runs.items() if own is results), share))
        return value_at(results, share)

    monkeypatch.setattr(computed_arms, "value_at", logged)
    ended_second_best = 0
    for rng_seed in range(40):
        read.clear()
        successive_halving(runs, 0.4, rng_seed)
        first, *trained = read  # The first value shows whether the first decision is known.
        assert first[1] == 0.1
        order = list(dict.fromkeys(size for size, _ in trained))
        if order[-1] == 3:
            # It is the second of four after a quarter, so it continues to one half.
            ended_second_best += 1
            assert [share for size, share in trained if size == 3][:2] == [0.1, 0.2]
    assert ended_second_best > 0


def test_successive_halving_depends_on_the_order_that_the_rng_seed_gives():
    spent = {successive_halving(constant(4.0, 3.0, 2.0, 1.0), 0.4, rng_seed)[1] for rng_seed in range(20)}
    assert len(spent) > 2
    again = [successive_halving(constant(4.0, 3.0, 2.0, 1.0), 0.4, 3) for _ in range(2)]
    assert again[0] == again[1]


def test_halving_is_charged_for_all_its_trainings(monkeypatch: pytest.MonkeyPatch):
    """The selected size is trained with the compute that the others leave, whatever the order."""
    runs = {1: answers(lambda mark: 8.0), 2: answers(lambda mark: 4 - math.log2(mark))}
    seen = []

    def halved(*given: object) -> tuple[int, float]:
        seen.append((given[1], successive_halving(*given)))
        return seen[-1][1]

    monkeypatch.setattr(computed_arms, "successive_halving", halved)
    found = computed_arm("halving", runs, 0)
    length, (size, spent) = seen[-1]
    assert size == 2
    assert spent <= 1.0
    assert seen[-2][1][1] > 1.0, "a longer training would have cost too much"
    assert found[-1].val_loss == pytest.approx(4 - math.log2(length + 1 - spent))
    assert found[-1].test_loss == found[-1].val_loss + 10


def test_halving_has_no_result_where_its_first_decision_comes_before_the_first_mark():
    runs = constant(4.0, 3.0, 2.0, 1.0)
    found = computed_arm("halving", runs, 1)
    known = [mark for mark, result in zip(MARKS, found, strict=True) if result is not None]
    # A full training has at least a quarter of the mark, and the first decision is at a quarter of that.
    assert known == [mark for mark in MARKS if mark >= min(known)]
    assert 1 / 16 <= min(known) <= 1 / 4


def test_extrapolation_selects_the_size_with_the_best_predicted_loss_and_continues_its_short_run():
    # Losses are a · compute ** -b. At the end of a short run, 1/6 of the compute, sizes 1, 2 and 3 are at
    # 1.20, 1.58 and 2.45 of a loss; predicted for 1/2 of the compute they are 1.07, 1.13 and 1.41. At all
    # marks the smallest is better, although the largest gains most.
    slow = {size: answers(lambda mark, b=b: mark**-b) for size, b in ((1, 0.1), (2, 0.25), (3, 0.5))}
    end = computed_arm("extrapolated", slow, 0)[-1]
    # The three short runs cost 1/2; the smallest size continues with the other half, so to 2/3.
    assert end.val_loss == pytest.approx((2 / 3) ** -0.1, rel=2e-3)
    # Lines that cross between 1/6 and 1/2: the largest is worse when it is selected, and best afterwards.
    crossing = {1: slow[1], 2: slow[2], 3: answers(lambda mark: 0.5 * mark**-0.6)}
    late = computed_arm("extrapolated", crossing, 0)[-1]
    assert value_at(crossing[3], 1 / 6) > value_at(crossing[1], 1 / 6)
    assert late.val_loss == pytest.approx(0.5 * (2 / 3) ** -0.6, rel=1e-2)


def test_extrapolation_trains_a_size_without_a_short_run_from_the_start():
    # Sizes 1, 3 and 4 have short runs; the parabola through their losses has its minimum at size 2.
    runs = {size: answers(lambda mark, size=size: 1 + (math.log(size / 2)) ** 2) for size in (1, 2, 3, 4)}
    runs[2] = answers(lambda mark: mark**-0.3)
    assert computed_arm("extrapolated", runs, 0)[-1].val_loss == pytest.approx(0.5**-0.3, rel=2e-3)
    assert computed_arm("extrapolated", runs, 0)[0] is None


def test_halving_without_optuna_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(computed_arms.EsperError, match="'halving' is run by Optuna, not installed here"):
        computed_arm("halving", constant(2.0, 1.0), 0)
