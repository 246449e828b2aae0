"""Arms that are computed from the recorded runs of static arms, and charged with the compute that the same
training would have cost: successive halving over the sizes, and a choice by extrapolation.

A run of a static size with one rng seed is always the same run, so a search that trains sizes can read their
recorded losses. Between marks, losses are interpolated over the logarithm of compute. A search whose
shortest training ends before the first mark has no result.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from esper.leyline import EsperError
from esper.study.one_run import MarkResult

Runs = Mapping[int, Sequence[MarkResult]]
"""Results of static runs with one rng seed at every mark, by size."""
LENGTHS = 25
"""Number of lengths of a full training among which ``halving`` has its own."""
PROBE = 1 / 6
"""Share of the compute that each of the three short runs of ``extrapolated`` has."""


def computed_arm(kind: str, runs: Runs, rng_seed: int) -> list[MarkResult | None]:
    """Return the results of ``halving`` or ``extrapolated`` at every mark; None where it has none."""
    results: list[MarkResult | None] = []
    for index, mark in enumerate(answer.mark for answer in next(iter(runs.values()))):
        choice = _halving(runs, mark, rng_seed) if kind == "halving" else _extrapolated(runs, mark)
        if choice is None:
            results.append(None)
            continue
        size, share = choice
        own = {name: value_at(runs[size], share, name) for name in ("val_loss", "test_loss", "test_score")}
        results.append(msgspec.structs.replace(runs[size][index], seconds=None, **own))
    return results


def value_at(answers: Sequence[MarkResult], share: float, name: str = "val_loss") -> float:
    """Return a loss or score of a run that ends at a ``share`` of the budget; NaN before the first mark."""
    marks = np.log([answer.mark for answer in answers])
    values = [getattr(answer, name) for answer in answers]
    return float(np.interp(math.log(share) + 1e-9, marks, values, left=math.nan))


def _halving(runs: Runs, mark: float, rng_seed: int) -> tuple[int, float] | None:
    """Return the size that successive halving selects, and the share of the budget that it is trained for.

    A full training is as long as possible if all trainings together shall fit into the mark; what is left is
    given to the selected size.
    """
    for length in np.geomspace(mark, mark / len(runs), LENGTHS):
        size, spent = successive_halving(runs, float(length), rng_seed)
        if spent <= mark * (1 + 1e-9):
            return size, float(length) + mark - spent
    return None


def successive_halving(runs: Runs, length: float, rng_seed: int) -> tuple[int, float]:
    """Search the sizes by Optuna's successive halving with a reduction factor of 2.

    Args:
        runs: Results of static runs, by size.
        length: Share of the budget of a training that is not stopped.
        rng_seed: Rng seed of the order in which Optuna tries the sizes.

    Returns:
        The selected size, and the share of the budget that all trainings spent; NaN if the first decision
        would come before the first mark.
    """
    try:
        import optuna  # noqa: PLC0415  an optional dependency
    except ModuleNotFoundError:
        raise EsperError(
            "the arm 'halving' is run by Optuna, not installed here: pip install optuna"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sizes, rungs, spent = list(runs), int(math.log2(len(runs))), 0.0
    if math.isnan(value_at(runs[sizes[0]], length / 2**rungs)):
        return sizes[0], math.nan

    def objective(trial: optuna.Trial) -> float:
        nonlocal spent
        answers = runs[trial.suggest_categorical("size", sizes)]
        before, loss = 0.0, math.nan
        for rung in range(rungs + 1):
            share = length / 2 ** (rungs - rung)
            spent, before, loss = spent + share - before, share, value_at(answers, share)
            trial.report(loss, 2**rung)
            if rung < rungs and trial.should_prune():
                raise optuna.TrialPruned
        return loss

    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2)
    sampler = optuna.samplers.GridSampler({"size": sizes}, seed=rng_seed % 2**32)
    study = optuna.create_study(sampler=sampler, pruner=pruner)
    study.optimize(objective, n_trials=len(sizes))
    return int(study.best_params["size"]), spent


def _extrapolated(runs: Runs, mark: float) -> tuple[int, float] | None:
    """Return the size that three short runs select, and the share of the budget that it is trained for.

    The loss of the smallest, the middle and the largest size at the remaining compute is predicted by a
    power law through its losses at the end of its short run and at 0.71 of it. A parabola through the three
    logarithms of loss, over the logarithm of size, predicts the other sizes. If the selected size has a short
    run, that run continues.
    """
    sizes = sorted(runs)
    tried = sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})
    probe, left = PROBE * mark, mark * (1 - PROBE * len(tried))
    late, early = (
        np.log([value_at(runs[size], share) for size in tried]) for share in (probe, probe / math.sqrt(2))
    )
    if np.isnan(early).any():
        return None
    predicted = late + (late - early) * math.log(left / probe) / math.log(math.sqrt(2))
    curve = np.polyfit(np.log(tried), predicted, len(tried) - 1)
    best = sizes[int(np.polyval(curve, np.log(sizes)).argmin())]
    return best, left + probe * (best in tried)
