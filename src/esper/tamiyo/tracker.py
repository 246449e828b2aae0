"""Trends over the last epochs, computed from the facts of each epoch, for the decisions of a controller.

The tracker's arrays are ``[env]`` or ``[env, epoch]``, for the last five epochs; the state of slots is in the
``SlotTable``.
"""

import numpy as np

from esper.leyline import HISTORY_LENGTH, OP_GERMINATE, EpochFacts, TrainingSignals
from esper.leyline.factored_actions import BoolArray, FloatArray, IntArray
from esper.leyline.thresholds import PLATEAU_GAIN, STABLE_EPOCHS, STABLE_LOSS_GAIN


class SignalTracker:
    """Computes ``TrainingSignals`` from ``EpochFacts``, one update per epoch, all environments at once.

    When an environment is at epoch 0, its trends restart, and those of other environments continue.
    """

    def __init__(self, num_envs: int) -> None:
        self._num_envs = num_envs
        self.reset()

    def reset(self) -> None:
        """Clear all trends: the next update is the first update of every environment."""
        count = self._num_envs
        self._started: BoolArray = np.zeros(count, dtype=np.bool_)
        self._losses: FloatArray = np.zeros((count, HISTORY_LENGTH))
        self._scores: FloatArray = np.zeros((count, HISTORY_LENGTH))
        self._best_loss: FloatArray = np.full(count, np.inf)
        self._best_score: FloatArray = np.full(count, -np.inf)
        self._plateau: IntArray = np.zeros(count, dtype=np.int64)
        self._settled: IntArray = np.zeros(count, dtype=np.int64)
        self._stabilised: BoolArray = np.zeros(count, dtype=np.bool_)
        self._loss_at_birth: FloatArray = np.full(count, np.nan)
        self._slope_at_birth: FloatArray = np.full(count, np.nan)
        self._steps_since_birth: IntArray = np.zeros(count, dtype=np.int64)

    def update(self, facts: EpochFacts) -> TrainingSignals:
        """Return the training signals after an epoch; later updates do not change the returned arrays."""
        loss, score = facts.val_loss, facts.val_score
        fresh = (facts.epoch == 0) | ~self._started
        self._started = np.ones(self._num_envs, dtype=np.bool_)
        # A diverged host can have an infinite loss in two epochs in a row; the difference of the losses is
        # NaN.
        with np.errstate(invalid="ignore"):
            loss_delta = np.where(fresh, 0.0, self._losses[:, -1] - loss)
            score_delta = np.where(fresh, 0.0, score - self._scores[:, -1])
        self._count(fresh, loss_delta, score_delta)
        self._follow_last_seed(fresh, facts)
        self._remember(fresh, loss, score)
        return TrainingSignals(
            facts=facts,
            loss_delta=loss_delta,
            score_delta=score_delta,
            plateau_epochs=self._plateau,
            stabilised=self._stabilised,
            loss_history=self._losses,
            score_history=self._scores,
            best_score=self._best_score,
            best_loss=self._best_loss,
            gain_ratio=self._gain_ratio(loss),
        )

    def _count(self, fresh: BoolArray, loss_delta: FloatArray, score_delta: FloatArray) -> None:
        """Update the counts of plateau epochs and of epochs with a steady loss; call before ``_remember``."""
        # An epoch with a score gain of NaN is a plateau epoch, since comparisons with NaN are false.
        gained = fresh | (score_delta >= PLATEAU_GAIN)
        self._plateau = np.where(gained, 0, self._plateau + 1)

        low, high = STABLE_LOSS_GAIN
        with np.errstate(invalid="ignore", divide="ignore"):
            relative = loss_delta / np.abs(self._losses[:, -1])
        within = ~fresh & (relative > low) & (relative < high)
        self._settled = np.where(within, self._settled + 1, 0)
        self._stabilised = (self._stabilised & ~fresh) | (self._settled >= STABLE_EPOCHS)

    def _follow_last_seed(self, fresh: BoolArray, facts: EpochFacts) -> None:
        """At a germination, store the loss before it and the slope of the losses before it; call before
        ``_remember``."""
        born = ~fresh & (facts.last_op == OP_GERMINATE) & facts.last_success
        before = loss_slope(self._losses, facts.epoch - 1)
        self._loss_at_birth = np.where(born, self._losses[:, -1], self._loss_at_birth)
        self._slope_at_birth = np.where(born, before, self._slope_at_birth)
        self._loss_at_birth[fresh] = np.nan
        self._steps_since_birth = np.where(born, 1, self._steps_since_birth + 1)

    def _gain_ratio(self, loss: FloatArray) -> FloatArray:
        promised = self._slope_at_birth * self._steps_since_birth
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            return np.where(promised > 0.0, (self._loss_at_birth - loss) / promised, np.nan)

    def _remember(self, fresh: BoolArray, loss: FloatArray, score: FloatArray) -> None:
        """Store histories and best values in new arrays, since returned signals refer to the old arrays."""
        self._losses = _push(self._losses, loss, fresh)
        self._scores = _push(self._scores, score, fresh)
        self._best_loss = np.where(fresh, loss, np.fmin(self._best_loss, loss))
        self._best_score = np.where(fresh, score, np.fmax(self._best_score, score))


def _push(history: FloatArray, value: FloatArray, fresh: BoolArray) -> FloatArray:
    """Append ``value`` to ``history [env, epoch]`` and drop the oldest epoch; in environments with ``fresh``,
    set all epochs to ``value``."""
    moved = np.concatenate([history[:, 1:], value[:, None]], axis=1)
    return np.where(fresh[:, None], value[:, None], moved)


def loss_slope(history: FloatArray, epoch: IntArray) -> FloatArray:
    """Return the mean loss decrease per step over ``history [env, epoch]``; NaN before the first step.

    A new history has the first loss in all its entries, so the oldest entry is the first loss until the
    history is full.
    """
    steps = np.minimum(epoch, HISTORY_LENGTH - 1)
    with np.errstate(invalid="ignore", over="ignore"):
        return (history[:, 0] - history[:, -1]) / np.where(steps > 0, steps, np.nan)
