"""What each seed is worth: the validation score with seeds switched on and off.

Of up to four seeds every configuration is scored, of more of them leave-one-out and some orders.
Contributions come with a paired error bar: both networks see the same samples, so only the
difference per sample counts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations, product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.kasmina.model import MorphogeneticModel
from esper.tolaria.calibration import check_calibration
from esper.tolaria.objective import Objective
from esper.tolaria.switching import Answers, Prefix, outputs_by_prefix, outputs_by_replay

FloatArray = NDArray[np.float64]
Order = tuple[int, ...]
"""The measured seeds in some order."""

EXACT_LIMIT = 4
"""Up to this many seeds all on/off configurations are scored."""
SAMPLED_PERMUTATIONS = 8


@dataclass(frozen=True, slots=True)
class Counterfactuals:
    """Scores of configurations of the measured seeds; ``slots [n]`` are slot indices.

    The last configuration is the network as it stands, with everything on.
    """

    slots: tuple[int, ...]
    configurations: NDArray[np.bool_]
    """``[configuration, n]``: which of the measured seeds are on."""
    scores: FloatArray
    losses: FloatArray
    contribution: FloatArray
    error: FloatArray
    shapley: FloatArray
    """NaN where it was not measured."""
    interactions: FloatArray
    """``[n, n]``, NaN where it was not measured and on the diagonal."""

    @property
    def score(self) -> float:
        return float(self.scores[-1])

    @property
    def loss(self) -> float:
        return float(self.losses[-1])

    def loss_without(self, slot: int) -> float:
        """Loss with the seed at ``slot`` off and all others on."""
        off = np.array([other != slot for other in self.slots])
        (row,) = np.flatnonzero((self.configurations == off).all(axis=1))
        return float(self.losses[row])

    def interaction_sums(self) -> FloatArray:
        """Sum over partners per seed; NaN without a partner, or if one was not measured."""
        return np.where(self._all_partners_known(), np.nansum(self.interactions, axis=1), np.nan)

    def strongest_boosts(self) -> FloatArray:
        """Largest positive interaction per seed, 0 if none is positive; NaN as for the sums."""
        best = np.nan_to_num(self.interactions).max(axis=1, initial=0.0)
        return np.where(self._all_partners_known(), best, np.nan)

    def _all_partners_known(self) -> NDArray[np.bool_]:
        partners = len(self.slots) - 1
        known: NDArray[np.bool_] = (~np.isnan(self.interactions)).sum(axis=1) == partners
        return known & (partners > 0)


def measure(
    model: MorphogeneticModel,
    x: Tensor,
    y: Tensor,
    slots: Sequence[int],
    objective: Objective,
    generator: torch.Generator | None = None,
    *,
    calibration: Tensor | None = None,
    only_contributions: bool = False,
) -> Counterfactuals:
    """Score the network and every configuration of ``slots`` that can be afforded, in eval mode.

    With ``only_contributions`` that is each seed switched off by itself, and nothing more.
    ``generator`` draws the permutations where there are too many seeds for all configurations.
    ``calibration`` are training inputs, needed where there is batch normalisation. The model is left in
    the mode in which it was found.
    """
    check_calibration(model, calibration)
    was_training = model.training
    model.eval()
    ordered = tuple(sorted(slots))
    orders = [] if only_contributions else _orders(len(ordered), generator)
    configurations = _configurations(len(ordered), orders)
    if calibration is not None:
        answers = outputs_by_replay(model, x, ordered, configurations, calibration)
    else:
        answers = outputs_by_prefix(model, x, ordered, configurations)
    scores, losses = _scored(answers, y, objective, len(configurations))
    model.train(was_training)
    return attribute(ordered, configurations, scores, losses.mean(axis=1), orders)


def _scored(
    answers: Iterable[Answers], y: Tensor, objective: Objective, configurations: int
) -> tuple[FloatArray, FloatArray]:
    """Scores and losses, each ``[configuration, sample]``, in one read; no output is kept for long."""
    found: list[list[Tensor]] = [[] for _ in range(2 * configurations)]
    for row, samples, output in answers:
        found[row].append(objective.sample_scores(output, y[samples]))
        found[configurations + row].append(objective.sample_losses(output, y[samples]))
    read = torch.cat([part for parts in found for part in parts]).double().cpu().numpy()
    scores, losses = read.reshape(2, configurations, len(y))
    return scores, losses


def _orders(count: int, generator: torch.Generator | None) -> list[Order]:
    """Orders in which the seeds are switched on one by one: all of them if they are few, else a sample."""
    if count <= EXACT_LIMIT:
        return list(permutations(range(count)))
    if generator is None:
        return []
    return [tuple(torch.randperm(count, generator=generator).tolist()) for _ in range(SAMPLED_PERMUTATIONS)]


def _configurations(count: int, orders: Sequence[Order]) -> NDArray[np.bool_]:
    """Leave-one-out and every state on the way through ``orders``, sorted: everything on is the last.

    All orders together pass through all 2^n configurations.
    """
    rows = {tuple(index != out for index in range(count)) for out in [*range(count), None]}
    for order in orders:
        rows.update(_states(order))
    return np.array(sorted(rows), dtype=np.bool_).reshape(len(rows), count)


def _states(order: Order) -> list[Prefix]:
    """The configurations from nothing on to everything on, in this order."""
    return [tuple(index in order[:on] for index in range(len(order))) for on in range(len(order) + 1)]


def attribute(
    slots: tuple[int, ...],
    configurations: NDArray[np.bool_],
    sample_scores: FloatArray,
    losses: FloatArray,
    orders: Sequence[Order],
) -> Counterfactuals:
    """Contributions, error bars, Shapley values and interactions from scores ``[configuration, sample]``.

    The configurations contain leave-one-out, end with everything on and cover ``orders``.
    """
    scores = sample_scores.mean(axis=1)
    row_of = {tuple(bool(b) for b in row): index for index, row in enumerate(configurations)}
    count = len(slots)
    contribution, error = np.full(count, np.nan), np.full(count, np.nan)
    for index in range(count):
        without = row_of[tuple(other != index for other in range(count))]
        difference = sample_scores[-1] - sample_scores[without]
        contribution[index] = difference.mean()
        error[index] = difference.std(ddof=1) / np.sqrt(difference.size)
    return Counterfactuals(
        slots=slots,
        configurations=configurations,
        scores=scores,
        losses=losses,
        contribution=contribution,
        error=error,
        shapley=_shapley(count, orders, row_of, scores),
        interactions=_interactions(count, row_of, scores),
    )


def _shapley(
    count: int, orders: Sequence[Order], row_of: dict[Prefix, int], scores: FloatArray
) -> FloatArray:
    """Shapley values (1953): phi_i = mean over ``orders`` of v(those before i, and i) − v(those before i).

    Exact if these are all orders, unbiased if they were sampled, NaN if there are none; the sum is
    v(all) − v(none) in every case.
    """
    if not orders:
        return np.full(count, np.nan)
    values = np.zeros(count)
    for order in orders:
        values[list(order)] += np.diff([scores[row_of[state]] for state in _states(order)])
    return values / len(orders)


def _interactions(count: int, row_of: dict[Prefix, int], scores: FloatArray) -> FloatArray:
    """I_ij = v(all) − v(without i) − v(without j) + v(without both)."""
    matrix = np.full((count, count), np.nan)
    for i, j in product(range(count), repeat=2):
        rows = [row_of.get(tuple(k not in out for k in range(count))) for out in ((), (i,), (j,), (i, j))]
        if i != j and all(row is not None for row in rows):
            both, no_i, no_j, neither = (scores[row] for row in rows)
            matrix[i, j] = both - no_i - no_j + neither
    return matrix
