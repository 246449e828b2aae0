from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from esper.leyline import OP_GERMINATE, EpochFacts, TrainingSignals
from esper.tamiyo import SignalTracker
from tests.leyline.building import env_facts, facts_of


def follow(losses: Sequence[float], scores: Sequence[float] | None = None) -> list[TrainingSignals]:
    """Return the training signals of one environment over successive epochs."""
    tracker = SignalTracker(1)
    scores = scores or [50.0] * len(losses)
    epochs = zip(losses, scores, strict=True)
    return [tracker.update(facts_of(epoch, loss, score)) for epoch, (loss, score) in enumerate(epochs)]


def test_first_signals_of_a_tracker_have_zero_deltas_and_constant_histories() -> None:
    (signals,) = follow([2.5], [11.0])
    assert signals.loss_delta.tolist() == [0.0]
    assert signals.score_delta.tolist() == [0.0]
    assert signals.plateau_epochs.tolist() == [0]
    assert signals.stabilised.tolist() == [False]
    assert signals.loss_history.tolist() == [[2.5] * 5]
    assert signals.score_history.tolist() == [[11.0] * 5]
    assert (signals.best_loss.tolist(), signals.best_score.tolist()) == ([2.5], [11.0])
    assert (signals.facts.val_loss[0], signals.facts.val_score[0]) == (2.5, 11.0)


def test_loss_delta_and_score_delta_are_positive_for_an_improvement() -> None:
    signals = follow([2.0, 1.5, 1.75], [10.0, 30.0, 25.0])
    assert [s.loss_delta[0] for s in signals] == [0.0, 0.5, -0.25]
    assert [s.score_delta[0] for s in signals] == [0.0, 20.0, -5.0]


def test_loss_and_score_histories_are_oldest_first_and_padded_with_the_first_value() -> None:
    signals = follow([6.0, 5.0, 4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert signals[2].loss_history.tolist() == [[6.0, 6.0, 6.0, 5.0, 4.0]]
    assert signals[5].loss_history.tolist() == [[5.0, 4.0, 3.0, 2.0, 1.0]]
    assert signals[5].score_history.tolist() == [[2.0, 3.0, 4.0, 5.0, 6.0]]


def test_returned_signals_do_not_change_with_later_updates() -> None:
    tracker = SignalTracker(1)
    first = tracker.update(facts_of(0, 2.0, 50.0))
    for epoch in range(1, 8):
        tracker.update(facts_of(epoch, 2.0, 50.0 - epoch))
    assert first.loss_history.tolist() == [[2.0] * 5]
    assert (first.plateau_epochs[0], first.stabilised[0], first.best_score[0]) == (0, False, 50.0)


def test_plateau_epochs_is_the_number_of_epochs_in_a_row_with_a_score_gain_below_half_a_point() -> None:
    # Score gains are +0.25, −1, +0.5, +0.25; a gain of 0.5 ends the plateau.
    signals = follow([1.0] * 5, [50.0, 50.25, 49.25, 49.75, 50.0])
    assert [s.plateau_epochs[0] for s in signals] == [0, 1, 2, 0, 1]


def test_stabilised_becomes_true_after_three_epochs_in_a_row_with_a_steady_loss_and_stays_true() -> None:
    # The relative loss gains are 50 %, 2 %, 0, −4 % and 50 %; the loss is steady in the middle three epochs.
    losses = [200.0, 100.0, 98.0, 98.0, 101.92, 50.96]
    assert [bool(s.stabilised[0]) for s in follow(losses)] == [False, False, False, False, True, True]


@pytest.mark.parametrize(
    ("third", "stable"),
    [
        (97.0, False),  # A relative loss gain of +3 % does not count as steady.
        (97.5, True),
        (104.5, True),
        (105.0, False),  # A relative loss gain of −5 % does not count as steady.
    ],
)
def test_relative_loss_gains_at_the_limits_of_the_steady_range_do_not_count_as_steady(
    third: float, stable: bool
) -> None:
    assert bool(follow([100.0, 100.0, 100.0, third])[-1].stabilised[0]) is stable


def test_epoch_with_a_large_loss_change_resets_the_count_of_epochs_with_a_steady_loss() -> None:
    signals = follow([100.0, 100.0, 100.0, 90.0, 90.0, 90.0, 90.0])
    assert [bool(s.stabilised[0]) for s in signals] == [False] * 6 + [True]


def test_tracker_keeps_best_loss_and_best_score_of_the_episode() -> None:
    signals = follow([2.0, 1.0, 3.0], [10.0, 40.0, 20.0])
    assert [s.best_loss[0] for s in signals] == [2.0, 1.0, 1.0]
    assert [s.best_score[0] for s in signals] == [10.0, 40.0, 40.0]


def test_non_finite_loss_extends_the_plateau_and_is_never_the_best_loss() -> None:
    inf, nan = float("inf"), float("nan")
    signals = follow([2.0, inf, inf, nan, 1.0], [10.0, 5.0, nan, 6.0, 20.0])
    assert np.isnan(signals[2].loss_delta[0])
    assert [s.plateau_epochs[0] for s in signals] == [0, 1, 2, 3, 0]
    assert [s.best_loss[0] for s in signals] == [2.0, 2.0, 2.0, 2.0, 1.0]
    assert [s.best_score[0] for s in signals] == [10.0, 10.0, 10.0, 10.0, 20.0]
    assert not any(s.stabilised[0] for s in signals)


def test_gain_ratio_compares_the_loss_with_the_trend_before_germination() -> None:
    tracker = SignalTracker(1)

    def ratio(epoch: int, loss: float, op: int = 0) -> float:
        facts = replace(env_facts(epoch, loss), last_op=op)
        return float(tracker.update(EpochFacts.stack([facts])).gain_ratio[0])

    assert all(np.isnan([ratio(0, 3.0), ratio(1, 2.8), ratio(2, 2.6)]))
    # Before the germination at loss 2.6 the loss fell by 0.2 per step.
    # After the germination the loss falls by 0.4 in one step (ratio 2) and 0.5 in two steps (ratio 1.25).
    assert [ratio(3, 2.2, OP_GERMINATE), ratio(4, 2.1)] == pytest.approx([2.0, 1.25])
    # Before the next germination the loss fell by (3.0 - 2.1) / 4 per step.
    assert ratio(5, 2.325, OP_GERMINATE) == pytest.approx(-1.0)
    assert np.isnan(ratio(0, 3.0)), "new episode"


def test_epoch_0_of_an_environment_restarts_its_trends_and_not_those_of_other_environments() -> None:
    tracker = SignalTracker(2)
    for epoch in range(5):
        signals = tracker.update(facts_of(epoch, 2.0, 50.0, num_envs=2))
    assert signals.plateau_epochs.tolist() == [4, 4]
    assert signals.stabilised.tolist() == [True, True]
    signals = tracker.update(EpochFacts.stack([env_facts(5, 2.0, 50.0), env_facts(0, 4.0, 7.0)]))
    assert signals.plateau_epochs.tolist() == [5, 0]
    assert signals.stabilised.tolist() == [True, False]
    assert signals.loss_delta.tolist() == [0.0, 0.0]
    assert signals.loss_history.tolist() == [[2.0] * 5, [4.0] * 5]
    assert signals.best_loss.tolist() == [2.0, 4.0]
    assert signals.best_score.tolist() == [50.0, 7.0]
    signals = tracker.update(EpochFacts.stack([env_facts(6, 2.0, 50.0), env_facts(1, 3.0, 9.0)]))
    assert signals.loss_delta.tolist() == [0.0, 1.0]
    assert signals.loss_history.tolist() == [[2.0] * 5, [4.0, 4.0, 4.0, 4.0, 3.0]]


@pytest.mark.parametrize("epoch", [0, 4])
def test_update_of_a_tracker_after_reset_equals_a_first_update(epoch: int) -> None:
    tracker = SignalTracker(1)
    for before in range(5):
        tracker.update(facts_of(before, 2.0, 50.0))
    tracker.reset()
    signals = tracker.update(facts_of(epoch, 9.0, 1.0))
    assert (signals.loss_delta[0], signals.score_delta[0], signals.plateau_epochs[0]) == (0.0, 0.0, 0)
    assert signals.loss_history.tolist() == [[9.0] * 5]
    assert (signals.best_loss[0], signals.best_score[0], signals.stabilised[0]) == (9.0, 1.0, False)
