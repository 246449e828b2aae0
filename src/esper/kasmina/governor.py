"""Detection of a breakdown of a training: each validation loss is compared with earlier validation losses.

A high loss alone is no breakdown: a weak network may stay at chance level, the loss of predicting the
frequencies of the targets. An alarm is raised if the validation loss rises above earlier losses by more than
its usual variation, in consecutive epochs.
"""

import math
import statistics
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

AlarmKind = Literal["non-finite", "collapse", "divergence"]

WINDOW: Final = 5
"""Number of recent good epochs whose losses define the usual variation of the loss."""
LEARNED: Final = 0.25
"""Fraction by which the best loss must be below the chance-level loss before a collapse can be detected."""
COLLAPSED: Final = 0.98
"""Fraction of the chance-level loss at which a network counts as collapsed."""
USUAL_SPREADS: Final = 6.0
"""Allowed rise of the loss above the largest recent good loss, as a multiple of the median epoch-to-epoch
change of the loss."""
USUAL_RISE: Final = 0.15
"""Smallest allowed rise of the loss, as a fraction of the chance-level loss; if that loss is unknown, as a
fraction of the decrease of the loss so far."""
PASSED: Final = 0.5
"""Share of the allowed rise that remains allowed in the epoch after a bad epoch."""
CONFIRMED: Final = 2
"""Number of consecutive bad epochs that raise an alarm; a single non-finite loss raises an alarm at once."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """Reason to undo an epoch: kind of breakdown, the loss, and the limit that the loss has crossed."""

    kind: AlarmKind
    loss: float
    limit: float

    def __str__(self) -> str:
        if self.kind == "non-finite":
            return f"the loss is {self.loss}"
        return f"{self.kind}: the validation loss is {self.loss:.3g}, beyond {self.limit:.3g}"


class Governor:
    """Detects breakdowns of a training from the validation loss of every epoch."""

    def __init__(self, guess_loss: float | None = None) -> None:
        """Create a governor that has seen no losses.

        Args:
            guess_loss: Chance-level loss: the loss of a network that always predicts the frequencies of the
                targets. A return to this loss is a collapse, and the smallest allowed rise of the loss is
                proportional to this loss. Without ``guess_loss`` no collapse is detected, and the smallest
                allowed rise is proportional to the decrease of the loss so far.
        """
        self._guess_loss = guess_loss
        self._first = math.nan
        self._window: deque[float] = deque(maxlen=WINDOW)
        self._best = math.inf
        self._bad_epochs = 0

    @property
    def suspicious(self) -> bool:
        """Whether the last epoch was bad but raised no alarm yet."""
        return self._bad_epochs > 0

    def check(self, loss: float) -> Alarm | None:
        """Check the validation loss of the next epoch, and add a good loss to the recent good losses."""
        trouble = self.trouble_with(loss) or self._lingering_trouble(loss)
        if trouble is None:
            self._bad_epochs = 0
            self._window.append(loss)
            self._best = min(self._best, loss)
            self._first = loss if math.isnan(self._first) else self._first
            return None
        self._bad_epochs += 1
        confirmed = trouble.kind == "non-finite" or self._bad_epochs >= CONFIRMED
        return trouble if confirmed else None

    def forgive(self) -> None:
        """Reset the number of consecutive bad epochs, after the cause of the bad epochs was removed."""
        self._bad_epochs = 0

    def state(self) -> dict[str, Any]:
        return {
            "window": list(self._window),
            "first": self._first,
            "best": self._best,
            "bad_epochs": self._bad_epochs,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self._window = deque(state["window"], maxlen=WINDOW)
        self._first, self._best, self._bad_epochs = state["first"], state["best"], state["bad_epochs"]

    def trouble_with(self, loss: float) -> Alarm | None:
        """Return the alarm that the next loss ``loss`` would raise if no earlier epoch was bad; None if it is
        acceptable."""
        if not math.isfinite(loss):
            return Alarm("non-finite", loss, math.inf)
        guess = self._guess_loss
        if guess is not None and self._best <= (1 - LEARNED) * guess and loss >= COLLAPSED * guess:
            return Alarm("collapse", loss, COLLAPSED * guess)
        if len(self._window) < 2:
            return None
        usual = self._usual_limit()
        return Alarm("divergence", loss, usual) if loss > usual else None

    def _lingering_trouble(self, loss: float) -> Alarm | None:
        """Return an alarm if ``loss`` exceeds the lower limit that holds after a bad epoch; the loss of a
        diverged run can level off just below the usual limit.
        """
        if not self._bad_epochs or len(self._window) < 2:
            return None
        limit = self._usual_limit(PASSED)
        return Alarm("divergence", loss, limit) if loss > limit else None

    def _usual_limit(self, share: float = 1.0) -> float:
        """Return a limit of the loss: the largest recent good loss plus the fraction ``share`` of the allowed
        rise."""
        losses = list(self._window)
        steps = [abs(after - before) for before, after in pairwise(losses)]
        scale = self._first - self._best if self._guess_loss is None else self._guess_loss
        slack = max(USUAL_SPREADS * statistics.median(steps), USUAL_RISE * scale)
        return max(losses) + share * slack
