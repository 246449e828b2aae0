"""Replay of a recording: every cell is a tree of decisions with observations, and losses at its leaves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from esper.growbench.instances import DECISION_POINTS, MOST_BLOCKS, STEPS, Plan
from esper.growbench.store import PACKAGED, PlanRow, RecordingError, StepRow, columns_of, plan_of, rows_of

Features = NDArray[np.float32]
FEATURES: Final = (
    *("progress", "blocks", "since_growth", "candidate_cost", "log_minibatches", "log_minibatches_left"),
    *("log_batch", "log_rate", "data_share", "log_params", "progress_of_loss", "val_noise", "gap"),
    *("gain_per_doubling", "gain_error", "last_gain", "log_gradient", "contribution", "contribution_error"),
    "gradient_ratio",
)
"""Names of the observations at a decision point; none depends on the scale of the loss."""
SIZE: Final = 2 * len(FEATURES)
"""Length of an observation: all features, with 0 for unknown ones, and whether each is known."""
UNRECORDED: Final = -1


@dataclass
class Cell:
    """Recorded plans of one instance and rng seed, as a tree of decisions.

    Attributes:
        plans: Results of all plans, by plan.
        nodes: Decision points by the plan so far and the index of the decision point.
        observations: Observation of every node, ``[node, feature]``.
        children: For every node the next one after waiting and after growing, ``[node, 2]``; -1 if this was
            not recorded, and -2 - k if the episode ends with plan number k.
    """

    plans: dict[Plan, PlanRow]
    nodes: dict[tuple[Plan, int], int] = field(default_factory=dict)
    observations: Features = field(default_factory=lambda: np.zeros((0, SIZE), np.float32))
    children: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 2), np.int64))

    @property
    def first(self) -> PlanRow:
        """Any row of the cell, for its instance and rng seed."""
        return next(iter(self.plans.values()))

    @cached_property
    def losses(self) -> NDArray[np.float64]:
        """Logarithm of the test loss of every plan."""
        return np.log([row.test_loss for row in self.plans.values()])

    def regret(self, plan: Plan) -> float:
        """Return how far the test loss of a plan is above that of the best recorded plan, in percent.

        Raises:
            RecordingError: The plan was not recorded.
        """
        return 100.0 * float(self.losses[self.number(plan)] - self.losses.min())

    def number(self, plan: Plan) -> int:
        """Return the number of a recorded plan; raises RecordingError for any other."""
        if plan not in self.plans:
            raise self.unrecorded(plan)
        return list(self.plans).index(plan)

    def unrecorded(self, plan: Plan) -> RecordingError:
        """Return the error for a plan that was not recorded, which names the nearest recorded plan."""
        nearest = min(self.plans, key=lambda known: (_distance(known, plan), known))
        return RecordingError(
            f"plan {plan} was not recorded for instance {self.first.instance} and rng seed"
            f" {self.first.rng_seed}; the nearest recorded plan is {nearest}: take an action that the"
            " action_mask allows"
        )


def _distance(one: Plan, other: Plan) -> float:
    """Return the sum of the shifts in time that turn one plan into the other, in octaves; a block more or
    less counts as the whole training."""
    size = max(len(one), len(other))
    times = [
        np.pad(np.log2(np.array(plan) + 1.0), (0, size - len(plan)), constant_values=10.0)
        for plan in (one, other)
    ]
    return float(np.abs(times[0] - times[1]).sum())


def load(folder: Path | str = PACKAGED) -> list[Cell]:
    """Return all cells of a recording, sorted by instance and rng seed.

    Args:
        folder: Folder of the recording; the packaged one unless given.

    Raises:
        RecordingError: There is no recording in the folder, or a file is damaged.

    Example:
        >>> cells = esper.growbench.load()
        >>> cells[0].regret(())
    """
    steps = columns_of(Path(folder), StepRow)
    cells: dict[tuple[int, int], Cell] = {}
    for row in rows_of(Path(folder), PlanRow):
        cells.setdefault((row.instance, row.rng_seed), Cell({})).plans[plan_of(row.plan)] = row
    keys = np.stack([steps["instance"], steps["rng_seed"]], axis=1)
    begins = np.flatnonzero(np.r_[True, (keys[1:] != keys[:-1]).any(axis=1)])
    for begin, end in zip(begins, [*begins[1:], len(keys)], strict=True):
        cell = cells.get((int(keys[begin, 0]), int(keys[begin, 1])))
        if cell is not None:  # Steps without plans are of a recording that was interrupted.
            _grow_tree(cell, {name: column[begin:end] for name, column in steps.items()})
    return list(cells.values())


def _grow_tree(cell: Cell, steps: Mapping[str, NDArray[Any]]) -> None:
    """Fill the nodes, observations and children of a cell."""
    place = {
        (plan_of(plan), step): i
        for i, (plan, step) in enumerate(zip(steps["plan"], steps["step"], strict=True))
    }
    prefixes = {plan[:count] for plan in cell.plans for count in range(len(plan) + 1)}
    reached = [
        (prefix, at)
        for at, step in enumerate(DECISION_POINTS)
        for prefix in sorted(prefixes)
        if all(done < step for done in prefix) and any(_passes(plan, prefix, step) for plan in cell.plans)
    ]
    cell.nodes = {node: number for number, node in enumerate(reached)}
    cell.children = np.array([[_next(cell, node, grows) for grows in (False, True)] for node in reached])
    rows = [_path(place, prefix, DECISION_POINTS[at]) for prefix, at in reached]
    cell.observations = np.stack(
        [
            _observe(cell.first, prefix, {name: column[path] for name, column in steps.items()})
            for (prefix, _), path in zip(reached, rows, strict=True)
        ]
    )


def _passes(plan: Plan, prefix: Plan, step: int) -> bool:
    """Return whether a plan has grown exactly as ``prefix`` before ``step``."""
    return tuple(done for done in plan if done < step) == prefix


def _next(cell: Cell, node: tuple[Plan, int], grows: bool) -> int:
    prefix, at = node
    plan = (*prefix, DECISION_POINTS[at]) if grows else prefix
    if at + 1 < len(DECISION_POINTS):
        return cell.nodes.get((plan, at + 1), UNRECORDED)
    return -2 - list(cell.plans).index(plan) if plan in cell.plans else UNRECORDED


def _path(place: Mapping[tuple[Plan, int], int], prefix: Plan, until: int) -> list[int]:
    """Return the rows of a training from its begin to the step ``until``."""
    return [place[tuple(done for done in prefix if done < step), step] for step in range(until + 1)]


def _observe(drawn: PlanRow, prefix: Plan, path: Mapping[str, NDArray[Any]]) -> Features:
    now, last = {name: column[-1] for name, column in path.items()}, len(path["step"]) - 1
    losses, validated = path["train_loss"], path["val_loss"]
    # A step whose share of the budget is less than a minibatch trains nothing and has no training loss.
    recent = np.flatnonzero(~np.isnan(losses) & (path["step"] >= max(last // 2, 1)))
    slope, error = _per_doubling(path["step"][recent], losses[recent])
    fitted = float(losses[recent].mean()) if len(recent) else math.nan
    values = {
        "progress": last / STEPS,
        "blocks": len(prefix) / MOST_BLOCKS,
        "since_growth": (last - prefix[-1]) / STEPS if prefix else math.nan,
        "candidate_cost": now["candidate_cost"],
        "log_minibatches": math.log10(now["minibatches"] + 1),
        "log_minibatches_left": math.log10(max(now["minibatches_left"], 0.0) + 1),
        "log_batch": math.log10(drawn.batch_size),
        "log_rate": math.log10(drawn.rate),
        "data_share": drawn.data_share,
        "log_params": math.log10(now["params"]),
        "progress_of_loss": math.log(now["val_loss"] / validated[0]),
        "val_noise": now["val_error"] / now["val_loss"],
        "gap": math.log(now["val_loss"] / losses[-1]),
        "gain_per_doubling": -slope / fitted,
        "gain_error": error / fitted,
        "last_gain": math.log(losses[-2] / losses[-1]) if last > 1 else math.nan,
        "log_gradient": math.log(now["host_gradient_norm"] / path["host_gradient_norm"][1])
        if last
        else math.nan,
        "contribution": now["contribution"],
        "contribution_error": now["contribution_error"],
        "gradient_ratio": now["gradient_ratio"],
    }
    known = np.array([values[name] for name in FEATURES], np.float64)
    return np.concatenate([np.nan_to_num(known, nan=0.0), ~np.isnan(known)]).astype(np.float32)


def _per_doubling(steps: NDArray[Any], losses: NDArray[Any]) -> tuple[float, float]:
    """Return slope and standard error of a line fitted to losses over log2(steps); NaN for few points."""
    if len(steps) < 3:
        return math.nan, math.nan
    x = np.log2(steps) - np.log2(steps).mean()
    slope = float(x @ losses / (x @ x))
    rest = losses - losses.mean() - slope * x
    return slope, math.sqrt(float(rest @ rest) / (len(x) - 2) / float(x @ x))
