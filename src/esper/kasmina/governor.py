"""Detection of a training that breaks down, relative to the earlier losses of the same training.

No loss is bad in absolute terms: a weak network may stay at the loss of a blind guess without a breakdown. An
alarm is raised if the loss rises above earlier losses by more than their usual variation, and the rise
persists.
"""

import math
import statistics
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

AlarmKind = Literal["non-finite", "collapse", "divergence"]

WINDOW: Final = 5
"""Number of good epochs in the window that defines the usual variation of the loss."""
LEARNED: Final = 0.25
"""Share of the loss of a blind guess by which the best loss must be below that loss before a collapse can be
detected.
"""
COLLAPSED: Final = 0.98
"""Share of the loss of a blind guess at which a network has collapsed."""
USUAL_SPREADS: Final = 6.0
"""Number of median epoch-to-epoch changes by which a loss may exceed the largest loss of the window."""
USUAL_RISE: Final = 0.15
"""Share of the scale of losses by which any loss may rise."""
PASSED: Final = 0.5
"""Share of the allowed rise to which the loss must return before bad epochs are over."""
CONFIRMED: Final = 2
"""Number of consecutive bad epochs that raise an alarm; a single non-finite loss also raises an alarm."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """Alarm: the reason to undo an epoch."""

    kind: AlarmKind
    loss: float
    limit: float

    def __str__(self) -> str:
        if self.kind == "non-finite":
            return f"the loss is {self.loss}"
        return f"{self.kind}: the validation loss is {self.loss:.3g}, beyond {self.limit:.3g}"


class Governor:
    """Checks the validation loss of every epoch."""

    def __init__(self, guess_loss: float | None = None) -> None:
        """Create a governor without loss history.

        Args:
            guess_loss: Loss of a network that predicts the frequencies of the targets: the scale of the
                losses, and the loss of a collapse. None for an unknown loss or metric; the scale is then the
                progress so far.
        """
        self._guess_loss = guess_loss
        self._first = math.nan
        self._window: deque[float] = deque(maxlen=WINDOW)
        self._best = math.inf
        self._bad_epochs = 0

    @property
    def suspicious(self) -> bool:
        """Whether the last epoch was bad without raising an alarm."""
        return self._bad_epochs > 0

    def check(self, loss: float) -> Alarm | None:
        """Check the loss of the next epoch, and add it to the window if it is good."""
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
        """Forget bad epochs after their cause was removed."""
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
        """Return the alarm that ``loss`` would raise as the next loss, ignoring earlier bad epochs."""
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
        """Return an alarm for a loss just below the limit after a bad epoch, because the loss of a diverged
        run can level off there.
        """
        if not self._bad_epochs or len(self._window) < 2:
            return None
        limit = self._usual_limit(PASSED)
        return Alarm("divergence", loss, limit) if loss > limit else None

    def _usual_limit(self, share: float = 1.0) -> float:
        """Return the largest loss of the window plus the share ``share`` of the allowed rise."""
        losses = list(self._window)
        steps = [abs(after - before) for before, after in pairwise(losses)]
        scale = self._first - self._best if self._guess_loss is None else self._guess_loss
        slack = max(USUAL_SPREADS * statistics.median(steps), USUAL_RISE * scale)
        return max(losses) + share * slack
