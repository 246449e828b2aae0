"""When the governor raises an alarm, and when it must not."""

import math
from collections.abc import Sequence

import pytest

from esper.kasmina.governor import Alarm, Governor

GUESS = math.log(10)


def alarms(losses: Sequence[float], guess_loss: float) -> dict[int, str]:
    """The kind of alarm by the number of the epoch that raised it."""
    governor = Governor(guess_loss)
    raised = {number: governor.check(loss) for number, loss in enumerate(losses)}
    return {number: alarm.kind for number, alarm in raised.items() if alarm is not None}


CALM, RESTLESS = [0.30, 0.30, 0.31, 0.30, 0.31], [0.3, 0.7, 0.35, 0.75, 0.3]
RISING = [1.0, 0.5, 0.3, 0.2, 0.2, 0.19, 0.18, 0.9, 1.2]
# A text model whose learning rate went wrong. Worst of the last five good epochs 2.78, median step 0.09:
# the limit is 2.78 + 6·0.09 = 3.32, and 2.78 + 0.27 = 3.05 after a bad epoch.
LEARNING = [2.96, 2.78, 2.65, 2.54, 2.47, 2.41]


@pytest.mark.parametrize(
    ("losses", "guess_loss", "expected"),
    [
        ([math.nan], GUESS, {0: "non-finite"}),
        ([2.0, 1.8, math.inf], GUESS, {2: "non-finite"}),
        ([2.3, 2.1, 1.7, 1.2, 0.9, 0.7, 0.65, 0.6, 0.58, 0.57], GUESS, {}),
        # A host that never gets beyond a guess is healthy; falling back to one is a collapse when it lasts.
        ([2.31, 2.30, 2.29, 2.31, 2.28, 2.30, 2.32, 2.29], GUESS, {}),
        ([2.0, 1.5, 1.2, 2.3, 2.3], GUESS, {4: "collapse"}),
        ([2.0, 1.5, 1.2, 2.3, 1.1, 2.3, 1.0], GUESS, {}),
        # A rise beyond what is usual in this run is a divergence long before a guess, on the task's scale.
        (RISING, GUESS, {8: "divergence"}),
        ([10 * loss for loss in RISING], 10 * GUESS, {8: "divergence"}),
        ([*CALM, 0.9, 0.9], GUESS, {6: "divergence"}),
        ([*RESTLESS, 0.9, 0.9], GUESS, {}),
        ([0.2] * 6 + [0.4] * 6, GUESS, {}),
        # A bad epoch has passed only when the loss is well below the limit.
        ([*LEARNING, 4.34, 3.21, 3.17, 3.18], 3.1, dict.fromkeys((7, 8, 9), "divergence")),
        ([*LEARNING, 4.34, 3.06], 3.1, {7: "divergence"}),
        ([*LEARNING, 4.34, 3.04, 2.60, 2.50], 3.1, {}),
        ([*LEARNING, 3.21, 3.21], 3.1, {}),
    ],
)
def test_when_there_is_an_alarm(losses: list[float], guess_loss: float, expected: dict[int, str]) -> None:
    assert alarms(losses, guess_loss) == expected


def test_a_bad_loss_never_becomes_usual_and_after_its_cause_is_gone_one_may_pass_again() -> None:
    governor = Governor(GUESS)
    assert [governor.check(loss) for loss in (0.3, 0.3, 0.3, 0.3, 0.3, 1.0)] == [None] * 6
    assert governor.suspicious
    assert all(governor.check(1.0) is not None for _ in range(5)), "it is not got used to"
    governor.forgive()
    assert not governor.suspicious
    assert governor.check(1.0) is None


def test_an_alarm_says_what_was_found_and_what_is_allowed() -> None:
    assert str(Alarm("collapse", 2.31, 2.26)) == "collapse: the validation loss is 2.31, beyond 2.26"
    assert str(Alarm("non-finite", math.nan, math.inf)) == "the loss is nan"
