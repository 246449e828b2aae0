"""Contributions of seeds: the validation score of a network with its seeds switched on and off.

With up to four seeds every on/off configuration is scored. With more seeds, each seed is switched off alone,
and seeds are switched on one by one in a few random orders. A contribution has a paired standard error: all
configurations are scored on the same samples or batches, and the standard error is that of the score
differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import permutations, product
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from esper.kasmina.configurations import Prefix, outputs_by_prefix, outputs_by_replay
from esper.kasmina.device_work import DeviceWork, run_alone
from esper.kasmina.dry_run import (
    CALIBRATION_SAMPLES,
    batch_norms,
    call,
    check_calibration,
    exact_float32,
    fresh_statistics,
    kept_modes,
    kept_statistics,
)
from esper.kasmina.network import MorphogeneticModel
from esper.leyline import BoolArray, EsperError, FloatArray, HostError, SlotTable

Order = tuple[int, ...]
"""Order in which the measured seeds are switched on, as a permutation of their indices."""
Scorer = Callable[[Sequence[int], BoolArray], Tensor]
"""Function that returns scores and losses ``[2, configuration, observation]`` of on/off configurations
``[configuration, seed]``, on any device; an observation is a sample or a batch.
"""
Metric = Callable[[Tensor, Tensor], Tensor]
"""Function that computes one value per sample from outputs and targets."""
Evaluate = Callable[[], Any]
"""Function that returns a user's metric as one number, or as one number per batch."""

EXACT_LIMIT: Final = 4
"""Number of seeds up to which all on/off configurations are scored."""
SAMPLED_PERMUTATIONS: Final = 8
_FORM: Final = "it must return a number, or a sequence of numbers, one per batch"


@dataclass(frozen=True, slots=True)
class Contributions:
    """Scores of a network in on/off configurations of n seeds; ``slots [n]`` are the seeds' slot indices.

    The last of the on/off configurations is the present network, with all seeds on.
    """

    slots: tuple[int, ...]
    configurations: BoolArray
    """On/off states ``[configuration, n]`` of the n measured seeds."""
    scores: FloatArray
    losses: FloatArray
    contribution: FloatArray
    error: FloatArray
    shapley: FloatArray
    """Shapley values of the measured seeds; NaN if not computed."""
    interactions: FloatArray
    """Pair interactions ``[n, n]`` of the n measured seeds; NaN on the diagonal and for pairs that were not
    measured."""

    @property
    def score(self) -> float:
        return float(self.scores[-1])

    @property
    def loss(self) -> float:
        return float(self.losses[-1])

    def loss_without(self, slot: int) -> float:
        """Return the loss of the network with the seed at ``slot`` off and all other seeds on."""
        off = np.array([other != slot for other in self.slots])
        (row,) = np.flatnonzero((self.configurations == off).all(axis=1))
        return float(self.losses[row])

    def interaction_sums(self) -> FloatArray:
        """Return the sum of each seed's pair interactions; NaN if there is no other seed, or a pair was not
        measured.
        """
        return np.where(self._all_partners_known(), np.nansum(self.interactions, axis=1), np.nan)

    def strongest_boosts(self) -> FloatArray:
        """Return each seed's largest positive pair interaction, 0 if none is positive; NaN if there is no
        other seed, or a pair was not measured.
        """
        best = np.nan_to_num(self.interactions).max(axis=1, initial=0.0)
        return np.where(self._all_partners_known(), best, np.nan)

    def _all_partners_known(self) -> BoolArray:
        partners = len(self.slots) - 1
        known: BoolArray = (~np.isnan(self.interactions)).sum(axis=1) == partners
        return known & (partners > 0)


def measure(slots: Sequence[int], score: Scorer, **settings: Any) -> Contributions:
    """Return the result of ``measuring``, which has the same arguments, without deferring the read from the
    device."""
    return run_alone(measuring(slots, score, **settings))


def measuring(
    slots: Sequence[int],
    score: Scorer,
    *,
    generator: torch.Generator | None = None,
    only_contributions: bool = False,
) -> DeviceWork[Contributions]:
    """Score the network in on/off configurations of the seeds in ``slots``, and compute the seeds'
    contributions.

    Args:
        slots: Indices of the slots whose seeds are switched; for an empty list, only the present network is
            scored.
        score: Function that scores all configurations, on the same samples or batches.
        generator: Random generator for the orders in which seeds are switched on; needed for Shapley values
            of more than four seeds.
        only_contributions: Score only the whole network and the configurations with one seed switched off.
    """
    ordered = tuple(sorted(slots))
    orders = [] if only_contributions else _orders(len(ordered), generator)
    configurations = _configurations(len(ordered), orders)
    scores, losses = yield score(ordered, configurations)
    return attribute(ordered, configurations, scores, losses.mean(axis=1), orders)


def score_samples(
    model: MorphogeneticModel,
    x: Tensor,
    y: Tensor,
    sample_scores: Metric,
    sample_losses: Metric,
    calibration: Tensor | None = None,
) -> Scorer:
    """Return a function that scores on/off configurations on the samples ``x, y`` and restores the training
    mode of all modules.

    Args:
        model: Network to score, in evaluation mode while it is scored.
        x: Inputs of the validation samples.
        y: Targets of the validation samples.
        sample_scores: Function that returns the score of every sample; higher is better.
        sample_losses: Function that returns the loss of every sample.
        calibration: Training inputs to recompute batch-normalisation statistics; required for networks with
            batch normalisation.
    """
    check_calibration(model, calibration)

    def score(slots: Sequence[int], configurations: BoolArray) -> Tensor:
        count = len(configurations)
        found: list[list[Tensor]] = [[] for _ in range(2 * count)]
        with evaluating(model), exact_float32():
            if calibration is not None or model.segments is None:
                outputs = outputs_by_replay(model, x, slots, configurations, calibration)
            else:
                outputs = outputs_by_prefix(model, x, slots, configurations)
            for row, samples, output in outputs:  # Scores and losses are stored, outputs are not.
                found[row].append(sample_scores(output, y[samples]))
                found[count + row].append(sample_losses(output, y[samples]))
        return torch.cat([part for parts in found for part in parts]).view(2, count, len(y))

    return score


def evaluating(module: nn.Module) -> AbstractContextManager[None]:
    """Set evaluation mode inside the context and restore the training mode of every submodule on exit."""
    return kept_modes(module, training=False)


class MetricScorer:
    """Scores on/off configurations by a user's metric; every evaluation uses the same random numbers.

    Args:
        model: Network whose seeds are switched off.
        evaluate: Function that returns the metric of the network.
        mode: ``"min"`` if a smaller metric is better, as for a loss, or ``"max"``.
        calibrate: Training batches from which batch-normalisation statistics of each configuration are
            recomputed.
    """

    def __init__(
        self,
        model: MorphogeneticModel,
        evaluate: Evaluate,
        *,
        mode: str,
        calibrate: Iterable[Any] | None = None,
    ) -> None:
        if not callable(evaluate):
            raise EsperError(
                f"evaluate is {type(evaluate).__name__}; pass a function that returns the metric"
            )
        self._model = model
        self._evaluate = evaluate
        self._sign = 1.0 if mode == "max" else -1.0
        self._calibrate = calibrate if batch_norms(model.host) else None
        self._position = torch.get_rng_state()
        # With recomputed statistics the present network is evaluated with the other configurations.
        self._values = self._run() if self._calibrate is None else []
        self._next_position = torch.get_rng_state()

    def __call__(self, slots: Sequence[int], configurations: BoolArray) -> Tensor:
        rows = []
        try:
            with kept_statistics(self._model.host):
                for configuration in configurations:
                    off = [slot for slot, on in zip(slots, configuration, strict=True) if not on]
                    rows.append(self._without(off))
        finally:
            torch.set_rng_state(self._next_position)
        lengths = {len(row) for row in rows}
        if len(lengths) > 1:
            raise EsperError(
                f"evaluate returned {len(rows[-1])} values and, with a seed switched off,"
                f" {next(n for n in map(len, rows) if n != len(rows[-1]))};"
                " it must go over the same batches each time"
            )
        scores = torch.tensor(rows, dtype=torch.float64)
        scores[~scores.isfinite()] = math.nan  # A difference of infinities is no contribution.
        return torch.stack([scores, -scores])

    def _without(self, off: Sequence[int]) -> list[float]:
        if not off and self._calibrate is None:
            return self._values
        with ExitStack() as switches:
            for slot in off:
                switches.enter_context(self._model.slots[slot].held.switched_off())
            if self._calibrate is not None:
                self._recalibrate(self._calibrate)
            torch.set_rng_state(self._position)
            values = self._run()
        if not off:
            self._next_position = torch.get_rng_state()
        return values

    def _recalibrate(self, batches: Iterable[Any]) -> None:
        """Recompute the batch-normalisation statistics of the network on training batches."""
        torch.set_rng_state(self._position)
        with fresh_statistics(self._model.host):
            seen = 0
            for batch in batches:
                seen += feed(self._model.host, batch)
                if seen >= CALIBRATION_SAMPLES:
                    break
        if not seen:
            raise EsperError("calibrate= holds no batches; pass a loader of training batches")

    def _run(self) -> list[float]:
        with kept_modes(self._model.host):
            found = self._evaluate()
        return [self._sign * value for value in _numbers(found)]


def _numbers(found: Any) -> list[float]:
    if isinstance(found, Tensor):
        found = found.flatten()
    single = not hasattr(found, "__iter__")
    try:
        values = [
            float(value.detach() if isinstance(value, Tensor) else value)
            for value in ([found] if single else found)
        ]
    except (TypeError, ValueError):
        raise EsperError(f"evaluate returned {type(found).__name__} ({str(found)[:40]}); {_FORM}") from None
    if not values or isinstance(found, str | bytes | dict):
        raise EsperError(f"evaluate returned {str(found)[:40]!r}; {_FORM}")
    return values


def feed(net: nn.Module, batch: Any) -> int:
    """Run the network on a training batch, without targets if its forward does not accept them; return the
    batch size.
    """
    try:
        call(net, batch)
    except HostError:
        batch = batch[0]
        call(net, batch)
    first = next(iter(batch.values())) if isinstance(batch, dict) else batch
    while isinstance(first, list | tuple):
        first = first[0]
    return len(first)


def record_contributions(table: SlotTable, found: Contributions) -> None:
    """Store contributions, Shapley values and interactions in the slot table; gate G5 requires a
    contribution."""
    sums, boosts = found.interaction_sums(), found.strongest_boosts()
    for index, slot in enumerate(found.slots):
        table.record_contribution(0, slot, float(found.contribution[index]), float(found.error[index]))
        table.shapley[0, slot] = found.shapley[index]
        table.interaction_sum[0, slot] = sums[index]
        table.strongest_boost[0, slot] = boosts[index]


def _orders(count: int, generator: torch.Generator | None) -> list[Order]:
    """Return orders in which seeds are switched on one by one: all orders of up to four seeds; for more
    seeds, random orders or, without ``generator``, none.
    """
    if count <= EXACT_LIMIT:
        return list(permutations(range(count)))
    if generator is None:
        return []
    return [tuple(torch.randperm(count, generator=generator).tolist()) for _ in range(SAMPLED_PERMUTATIONS)]


def _configurations(count: int, orders: Sequence[Order]) -> BoolArray:
    """Return all configurations with at most one seed off, and all that occur while seeds are switched on one
    by one in the orders ``orders``. Rows are sorted, and in the last row all seeds are on.

    All orders of n seeds together contain all 2^n configurations.
    """
    rows = {tuple(index != out for index in range(count)) for out in [*range(count), None]}
    for order in orders:
        rows.update(_states(order))
    return np.array(sorted(rows), dtype=np.bool_).reshape(len(rows), count)


def _states(order: Order) -> list[Prefix]:
    """Return the on/off configurations from all seeds off to all seeds on, with seeds switched on in the
    given order."""
    return [tuple(index in order[:on] for index in range(len(order))) for on in range(len(order) + 1)]


def attribute(
    slots: tuple[int, ...],
    configurations: BoolArray,
    sample_scores: FloatArray,
    losses: FloatArray,
    orders: Sequence[Order],
) -> Contributions:
    """Compute contributions, errors, Shapley values and interactions from scores ``[configuration, sample]``.

    The rows of ``configurations`` must include, for every seed, the configuration with this seed off and all
    others on, and all configurations that occur in ``orders``. In the last row all seeds are on.
    """
    scores = sample_scores.mean(axis=1)
    row_of = {tuple(bool(b) for b in row): index for index, row in enumerate(configurations)}
    count = len(slots)
    contribution, error = np.full(count, np.nan), np.full(count, np.nan)
    for index in range(count):
        without = row_of[tuple(other != index for other in range(count))]
        difference = sample_scores[-1] - sample_scores[without]
        contribution[index] = difference.mean()
        if difference.size > 1:
            error[index] = difference.std(ddof=1) / math.sqrt(difference.size)
    return Contributions(
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
    """Return Shapley values (1953): phi_i = mean over ``orders`` of v(S + i) − v(S), with v the score and S
    the seeds before i.

    Shapley values are exact if ``orders`` has all orders, unbiased if it is a random sample, NaN if it is
    empty; their sum is v(all) − v(none).
    """
    if not orders:
        return np.full(count, np.nan)
    values = np.zeros(count)
    for order in orders:
        values[list(order)] += np.diff([scores[row_of[state]] for state in _states(order)])
    return values / len(orders)


def _interactions(count: int, row_of: dict[Prefix, int], scores: FloatArray) -> FloatArray:
    """Return pair interactions I_ij = v(all) − v(without i) − v(without j) + v(without i and j), with v the
    score.
    """
    matrix = np.full((count, count), np.nan)
    for i, j in product(range(count), repeat=2):
        rows = [row_of.get(tuple(k not in out for k in range(count))) for out in ((), (i,), (j,), (i, j))]
        if i != j and all(row is not None for row in rows):
            both, no_i, no_j, neither = (scores[row] for row in rows)
            matrix[i, j] = both - no_i - no_j + neither
    return matrix
