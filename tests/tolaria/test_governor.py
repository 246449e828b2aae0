"""When the governor raises an alarm, and when it must not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from esper.tolaria.governor import Alarm, Governor

GUESS = math.log(10)


def alarms(losses: Sequence[float], guess_loss: float = GUESS) -> dict[int, str]:
    """The kind of alarm by the number of the epoch that raised it."""
    governor = Governor(guess_loss)
    raised = {number: governor.check(loss) for number, loss in enumerate(losses)}
    return {number: alarm.kind for number, alarm in raised.items() if alarm is not None}


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_an_alarm_at_once(loss: float) -> None:
    assert alarms([loss]) == {0: "non-finite"}
    assert alarms([2.0, 1.8, loss]) == {2: "non-finite"}


def test_a_network_that_learns_raises_no_alarm() -> None:
    assert alarms([2.3, 2.1, 1.7, 1.2, 0.9, 0.7, 0.65, 0.6, 0.58, 0.57]) == {}


def test_a_host_that_never_gets_beyond_a_guess_is_healthy() -> None:
    assert alarms([2.31, 2.30, 2.29, 2.31, 2.28, 2.30, 2.32, 2.29]) == {}


def test_falling_back_to_a_guess_is_a_collapse_when_it_lasts() -> None:
    assert alarms([2.0, 1.5, 1.2, 2.3, 2.3]) == {4: "collapse"}
    assert alarms([2.0, 1.5, 1.2, 2.3, 1.1, 2.3, 1.0]) == {}, "one bad epoch may pass"


def test_a_rise_beyond_what_is_usual_is_a_divergence_long_before_a_guess() -> None:
    assert alarms([1.0, 0.5, 0.3, 0.2, 0.2, 0.19, 0.18, 0.9, 1.2]) == {8: "divergence"}


def test_a_bad_epoch_has_passed_only_when_the_loss_is_well_below_the_limit() -> None:
    # A text model whose learning rate went wrong. Worst of the last five good epochs 2.78, median step 0.09:
    # the limit is 2.78 + 6·0.09 = 3.32, and 2.78 + 0.27 = 3.05 after a bad epoch.
    learning = [2.96, 2.78, 2.65, 2.54, 2.47, 2.41]
    assert alarms([*learning, 4.34, 3.21, 3.17, 3.18], 3.1) == dict.fromkeys((7, 8, 9), "divergence")
    assert alarms([*learning, 4.34, 3.06], 3.1) == {7: "divergence"}
    assert alarms([*learning, 4.34, 3.04, 2.60, 2.50], 3.1) == {}
    assert alarms([*learning, 3.21, 3.21], 3.1) == {}, "without a bad epoch before it, it is a large step"


def test_what_is_usual_is_this_run_s_own() -> None:
    calm, restless = [0.30, 0.30, 0.31, 0.30, 0.31], [0.3, 0.7, 0.35, 0.75, 0.3]
    rise = [0.9, 0.9]
    assert alarms(calm + rise) == {6: "divergence"}
    assert alarms(restless + rise) == {}


def test_a_small_rise_is_no_divergence_however_calm_it_was() -> None:
    assert alarms([0.2] * 6 + [0.4] * 6) == {}


def test_the_scale_is_that_of_the_task() -> None:
    losses = [1.0, 0.5, 0.3, 0.2, 0.2, 0.19, 0.18, 0.9, 1.2]
    assert alarms([10 * loss for loss in losses], 10 * GUESS) == alarms(losses) == {8: "divergence"}


def test_a_bad_loss_never_becomes_usual() -> None:
    governor = Governor(GUESS)
    for loss in (0.3, 0.3, 0.3, 0.3, 0.3):
        assert governor.check(loss) is None
    assert governor.check(1.0) is None
    assert governor.suspicious
    assert all(governor.check(1.0) is not None for _ in range(5)), "it is not got used to"


def test_after_the_cause_was_removed_one_bad_epoch_may_pass_again() -> None:
    governor = Governor(GUESS)
    for loss in (0.3, 0.3, 0.3, 1.0, 1.0):
        governor.check(loss)
    governor.forgive()
    assert not governor.suspicious
    assert governor.check(1.0) is None


def test_an_alarm_says_what_was_found_and_what_is_allowed() -> None:
    assert str(Alarm("collapse", 2.31, 2.26)) == "collapse: the validation loss is 2.31, beyond 2.26"
    assert str(Alarm("non-finite", math.nan, math.inf)) == "the loss is nan"
