"""What each seed is worth: the validation score with seeds switched on and off.

On a segmented host every distinct prefix is computed once: at a slot that is to be switched, the
features with and without its seed go on side by side as one batch. Any other host is scored by full
forwards with one slot off at a time. Contributions come with a paired error bar: both networks see
the same samples, so only the difference per sample counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.kasmina.hosts.base import SegmentedHost
from esper.kasmina.model import MorphogeneticModel
from esper.tolaria.objective import Objective

FloatArray = NDArray[np.float64]

EXACT_LIMIT = 4
"""Up to this many seeds all on/off configurations are scored."""
SAMPLED_PERMUTATIONS = 8
REPLAY_SAMPLES = 512
"""Validation samples used for hosts that must replay their whole forward."""


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

    def interaction_sums(self) -> FloatArray:
        """Sum over partners per seed; NaN without a measured partner."""
        known = ~np.isnan(self.interactions)
        sums = np.where(known, self.interactions, 0.0).sum(axis=1)
        return np.where(known.any(axis=1), sums, np.nan)

    def strongest_boosts(self) -> FloatArray:
        """Largest positive interaction per seed, 0 if none is positive; NaN without a partner."""
        known = ~np.isnan(self.interactions)
        best = np.where(known, self.interactions, 0.0).max(axis=1, initial=0.0)
        return np.where(known.any(axis=1), best, np.nan)


def all_configurations(count: int) -> NDArray[np.bool_]:
    """Every on/off choice of ``count`` seeds, all off first, all on last; the last seed varies fastest."""
    return np.array(list(product((False, True), repeat=count)), dtype=np.bool_).reshape(2**count, count)


@torch.inference_mode()
def outputs_by_prefix(model: MorphogeneticModel, x: Tensor, slots: Sequence[int]) -> Tensor:
    """Outputs ``[2^n, batch, …]`` of a segmented host for every choice of ``slots``, in that order."""
    host = model.host
    if not isinstance(host, SegmentedHost):
        raise TypeError(f"a {type(host).__name__} has no segments to share")
    switched = set(slots)
    h = host.segments[0](x)
    for index, weight in enumerate(model.live_alphas):
        if weight is not None:
            slot = model.slot(index)
            slot.engage(weight)
            blended = slot(h)
            h = _beside(h, blended, x.shape[0]) if index in switched else blended
        h = host.segments[index + 1](h)
    return h.unflatten(0, (2 ** len(switched), x.shape[0]))


def _beside(off: Tensor, on: Tensor, batch: int) -> Tensor:
    """Interleave so that the configuration axis keeps the latest slot as its fastest bit."""
    if off.shape[0] == batch:
        return torch.cat([off, on])
    pairs = [part for both in zip(off.split(batch), on.split(batch), strict=True) for part in both]
    return torch.cat(pairs)


@torch.inference_mode()
def outputs_by_replay(
    model: MorphogeneticModel, x: Tensor, slots: Sequence[int], configurations: NDArray[np.bool_]
) -> Tensor:
    """Outputs ``[configuration, batch, …]`` by one plain forward each, for any host."""
    outputs = []
    for configuration in configurations:
        alphas = model.live_alphas
        for slot, on in zip(slots, configuration, strict=True):
            if not on:
                alphas[slot] = None
        outputs.append(model(x, alphas))
    return torch.stack(outputs)


def measure(
    model: MorphogeneticModel,
    x: Tensor,
    y: Tensor,
    slots: Sequence[int],
    objective: Objective,
    generator: torch.Generator | None = None,
) -> Counterfactuals:
    """Score the network and every configuration of ``slots`` that can be afforded, in eval mode.

    ``generator`` draws the permutations where there are too many seeds for all configurations.
    """
    model.eval()
    ordered = tuple(sorted(slots))
    count = len(ordered)
    if model.host.segmented and count <= EXACT_LIMIT:
        configurations = all_configurations(count)
        outputs = outputs_by_prefix(model, x, ordered)
    else:
        sampled = model.host.segmented and generator is not None
        configurations = _some_configurations(count, generator if sampled else None)
        if not model.host.segmented and count:
            x, y = x[:REPLAY_SAMPLES], y[:REPLAY_SAMPLES]
        outputs = outputs_by_replay(model, x, ordered, configurations)
    scores = torch.stack([objective.sample_scores(output, y) for output in outputs])
    losses = torch.stack([objective.sample_losses(output, y) for output in outputs])
    return attribute(ordered, configurations, scores.double().numpy(), losses.double().mean(dim=1).numpy())


def _some_configurations(count: int, generator: torch.Generator | None) -> NDArray[np.bool_]:
    """Leave-one-out, the prefixes of sampled permutations, and everything on as the last."""
    rows = {tuple(index != out for index in range(count)) for out in range(count)}
    for _ in range(SAMPLED_PERMUTATIONS if generator is not None else 0):
        on = [False] * count
        rows.add(tuple(on))
        for index in torch.randperm(count, generator=generator).tolist():
            on[index] = True
            rows.add(tuple(on))
    full = (True,) * count
    ordered = [*sorted(rows - {full}), full]
    return np.array(ordered, dtype=np.bool_).reshape(len(ordered), count)


def attribute(
    slots: tuple[int, ...],
    configurations: NDArray[np.bool_],
    sample_scores: FloatArray,
    losses: FloatArray,
) -> Counterfactuals:
    """Contributions, error bars, Shapley values and interactions from scores ``[configuration, sample]``."""
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
        shapley=_shapley(count, row_of, scores),
        interactions=_interactions(count, row_of, scores),
    )


def _shapley(count: int, row_of: dict[tuple[bool, ...], int], scores: FloatArray) -> FloatArray:
    """Exact where every subset was scored, else averaged over the marginals that were, else NaN.

    phi_i = sum over S without i of |S|! (n − |S| − 1)! / n! · (v(S + i) − v(S)). With sampled
    subsets the marginals are weighted the same way within each size and the sizes equally.
    """
    values = np.full(count, np.nan)
    for index in range(count):
        by_size: dict[int, list[float]] = {}
        for subset, row in row_of.items():
            joined = row_of.get((*subset[:index], True, *subset[index + 1 :]))
            if not subset[index] and joined is not None:
                by_size.setdefault(sum(subset), []).append(scores[joined] - scores[row])
        if len(by_size) == count:
            values[index] = sum(float(np.mean(marginals)) for marginals in by_size.values()) / count
    return values


def _interactions(count: int, row_of: dict[tuple[bool, ...], int], scores: FloatArray) -> FloatArray:
    """I_ij = v(all) − v(without i) − v(without j) + v(without both)."""
    matrix = np.full((count, count), np.nan)
    for i, j in product(range(count), repeat=2):
        rows = [row_of.get(tuple(k not in out for k in range(count))) for out in ((), (i,), (j,), (i, j))]
        if i != j and all(row is not None for row in rows):
            both, no_i, no_j, neither = (scores[row] for row in rows)
            matrix[i, j] = both - no_i - no_j + neither
    return matrix
