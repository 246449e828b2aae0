"""Watches one episode for signs of a breakdown, by what this episode itself has shown so far.

No loss is bad by itself: a weak host may stay at the loss of a blind guess and be healthy. What counts is
a fall from what was reached, beyond the ups and downs of the epochs before it, that does not pass.
"""

import math
import statistics
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

AlarmKind = Literal["non-finite", "collapse", "divergence"]

WINDOW: Final = 5
"""Good epochs that say what is usual."""
LEARNED: Final = 0.25
"""Share of the loss of a blind guess by which a network must have been better, to be able to collapse."""
COLLAPSED: Final = 0.98
"""Share of the loss of a blind guess at which a network knows nothing any more."""
USUAL_SPREADS: Final = 6.0
"""Typical steps from epoch to epoch by which a loss may exceed the worst of the window."""
USUAL_RISE: Final = 0.15
"""Share of the loss of a blind guess that any loss may rise by."""
PASSED: Final = 0.5
"""Share of that allowance within which a loss must be for a bad epoch to have passed."""
CONFIRMED: Final = 2
"""Bad epochs in a row that make an alarm; a loss that is not finite needs one."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """Why an epoch must not stand."""

    kind: AlarmKind
    loss: float
    limit: float

    def __str__(self) -> str:
        if self.kind == "non-finite":
            return f"the loss is {self.loss}"
        return f"{self.kind}: the validation loss is {self.loss:.3g}, beyond {self.limit:.3g}"


class Governor:
    """Checks the validation loss of every epoch."""

    def __init__(self, guess_loss: float) -> None:
        """``guess_loss`` is that of a network which knows how often each answer comes, and nothing else."""
        self._guess_loss = guess_loss
        self._window: deque[float] = deque(maxlen=WINDOW)
        self._best = math.inf
        self._bad_epochs = 0

    @property
    def suspicious(self) -> bool:
        """The last epoch was bad, but one bad epoch may pass."""
        return self._bad_epochs > 0

    def check(self, loss: float) -> Alarm | None:
        """What the loss of one more epoch says; a good one becomes part of what is usual."""
        trouble = self.trouble_with(loss) or self._lingering_trouble(loss)
        if trouble is None:
            self._bad_epochs = 0
            self._window.append(loss)
            self._best = min(self._best, loss)
            return None
        self._bad_epochs += 1
        confirmed = trouble.kind == "non-finite" or self._bad_epochs >= CONFIRMED
        return trouble if confirmed else None

    def forgive(self) -> None:
        """The cause is removed: the next epoch is checked afresh."""
        self._bad_epochs = 0

    def state(self) -> dict[str, Any]:
        return {"window": list(self._window), "best": self._best, "bad_epochs": self._bad_epochs}

    def load_state(self, state: dict[str, Any]) -> None:
        self._window = deque(state["window"], maxlen=WINDOW)
        self._best, self._bad_epochs = state["best"], state["bad_epochs"]

    def trouble_with(self, loss: float) -> Alarm | None:
        """What is wrong with ``loss``, were it the next one."""
        if not math.isfinite(loss):
            return Alarm("non-finite", loss, math.inf)
        lost = COLLAPSED * self._guess_loss
        if self._best <= (1 - LEARNED) * self._guess_loss and loss >= lost:
            return Alarm("collapse", loss, lost)
        if len(self._window) < 2:
            return None
        usual = self._usual_limit()
        return Alarm("divergence", loss, usual) if loss > usual else None

    def _lingering_trouble(self, loss: float) -> Alarm | None:
        """After a bad epoch a loss just below the limit is not good yet: a diverged run can level off
        there."""
        if not self._bad_epochs or len(self._window) < 2:
            return None
        limit = self._usual_limit(PASSED)
        return Alarm("divergence", loss, limit) if loss > limit else None

    def _usual_limit(self, share: float = 1.0) -> float:
        """The worst of the window and a ``share`` of what a loss may exceed it by."""
        losses = list(self._window)
        steps = [abs(after - before) for before, after in pairwise(losses)]
        slack = max(USUAL_SPREADS * statistics.median(steps), USUAL_RISE * self._guess_loss)
        return max(losses) + share * slack
