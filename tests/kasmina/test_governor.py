"""Alarms of the governor for given sequences of validation losses."""

import math
from collections.abc import Sequence

import pytest

from esper.kasmina.governor import Alarm, Governor

GUESS = math.log(10)


def alarms(losses: Sequence[float], guess_loss: float | None) -> dict[int, str]:
    """Return the kind of each alarm that the governor raises, by the epoch of the alarm."""
    governor = Governor(guess_loss)
    raised = {number: governor.check(loss) for number, loss in enumerate(losses)}
    return {number: alarm.kind for number, alarm in raised.items() if alarm is not None}


CALM, RESTLESS = [0.30, 0.30, 0.31, 0.30, 0.31], [0.3, 0.7, 0.35, 0.75, 0.3]
RISING = [1.0, 0.5, 0.3, 0.2, 0.2, 0.19, 0.18, 0.9, 1.2]
# Validation losses of a text model before its learning rate is set too high. In the last five epochs the
# largest loss is 2.78 and the median change 0.09, so the alarm limit is 2.78 + 6·0.09 = 3.32, or 2.78 + 0.27
# = 3.05 after a bad epoch.
LEARNING = [2.96, 2.78, 2.65, 2.54, 2.47, 2.41]


@pytest.mark.parametrize(
    ("losses", "guess_loss", "expected"),
    [
        ([math.nan], GUESS, {0: "non-finite"}),
        ([2.0, 1.8, math.inf], GUESS, {2: "non-finite"}),
        ([2.3, 2.1, 1.7, 1.2, 0.9, 0.7, 0.65, 0.6, 0.58, 0.57], GUESS, {}),
        # A loss that stays at chance level raises no alarm. After learning, a loss at chance level in two
        # consecutive epochs is a collapse.
        ([2.31, 2.30, 2.29, 2.31, 2.28, 2.30, 2.32, 2.29], GUESS, {}),
        ([2.0, 1.5, 1.2, 2.3, 2.3], GUESS, {4: "collapse"}),
        ([2.0, 1.5, 1.2, 2.3, 1.1, 2.3, 1.0], GUESS, {}),
        # A rise of the loss above its usual variation is a divergence; the smallest allowed rise is
        # proportional to the chance-level loss.
        (RISING, GUESS, {8: "divergence"}),
        ([10 * loss for loss in RISING], 10 * GUESS, {8: "divergence"}),
        ([*CALM, 0.9, 0.9], GUESS, {6: "divergence"}),
        ([*RESTLESS, 0.9, 0.9], GUESS, {}),
        ([0.2] * 6 + [0.4] * 6, GUESS, {}),
        # After a bad epoch the alarm limit is lower, until the loss of an epoch is below it.
        ([*LEARNING, 4.34, 3.21, 3.17, 3.18], 3.1, dict.fromkeys((7, 8, 9), "divergence")),
        ([*LEARNING, 4.34, 3.06], 3.1, {7: "divergence"}),
        ([*LEARNING, 4.34, 3.04, 2.60, 2.50], 3.1, {}),
        ([*LEARNING, 3.21, 3.21], 3.1, {}),
    ],
)
def test_governor_raises_the_expected_alarms_for_a_sequence_of_validation_losses(
    losses: list[float], guess_loss: float, expected: dict[int, str]
) -> None:
    assert alarms(losses, guess_loss) == expected


def test_alarm_limit_does_not_rise_with_bad_losses_and_one_more_bad_epoch_is_allowed_after_forgive() -> None:
    governor = Governor(GUESS)
    assert [governor.check(loss) for loss in (0.3, 0.3, 0.3, 0.3, 0.3, 1.0)] == [None] * 6
    assert governor.suspicious
    assert all(governor.check(1.0) is not None for _ in range(5)), "the limit does not rise"
    governor.forgive()
    assert not governor.suspicious
    assert governor.check(1.0) is None


def test_message_of_a_governor_alarm_contains_the_loss_and_the_alarm_limit() -> None:
    assert str(Alarm("collapse", 2.31, 2.26)) == "collapse: the validation loss is 2.31, beyond 2.26"
    assert str(Alarm("non-finite", math.nan, math.inf)) == "the loss is nan"


# --- losses of unknown scale -----------------------------------------------------------------------

# Negative accuracies, which serve as validation losses. The loss falls from −0.1 to −0.7, by 0.6, so the
# allowed rise is at least 0.15·0.6 = 0.09. Six times the median change of the last five losses is only
# 6·0.01 = 0.06. The largest of the last five losses is −0.66, so the alarm limit is −0.66 + 0.09 = −0.57.
ACCURACIES = [-0.1, -0.4, -0.6, -0.66, -0.67, -0.68, -0.69, -0.70]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([*ACCURACIES, -0.56, -0.56], {9: "divergence"}),
        ([*ACCURACIES, -0.58, -0.58, -0.58], {}),
        # Losses that are multiplied by 10 and shifted by 7 raise the same alarms.
        ([10 * loss + 7.0 for loss in [*ACCURACIES, -0.56, -0.56]], {9: "divergence"}),
        ([10 * loss + 7.0 for loss in [*ACCURACIES, -0.58, -0.58]], {}),
        # A return to the first loss is a divergence; collapses are detected only if the chance-level loss is
        # known.
        ([2.3, 1.5, 1.2, 1.0, 0.95, 0.93, 0.92, 0.91, 2.3, 2.3], {9: "divergence"}),
        ([0.0, 0.0, 0.0, 1e-9, 1e-9], {4: "divergence"}),
        ([-0.5, -0.6, math.nan], {2: "non-finite"}),
    ],
    ids=[
        "metric below the limit twice",
        "metric within the allowed rise",
        "scaled and shifted, beyond the limit",
        "scaled and shifted, within the allowed rise",
        "return to the first loss",
        "no progress and no variation",
        "loss is nan",
    ],
)
def test_alarm_limit_without_a_chance_level_loss_is_relative_to_the_decrease_of_the_loss_so_far(
    losses: list[float], expected: dict[int, str]
) -> None:
    assert alarms(losses, None) == expected


def test_governor_without_a_chance_level_loss_raises_no_alarm_in_the_first_two_epochs() -> None:
    assert alarms([-0.5, 40.0], None) == {}
