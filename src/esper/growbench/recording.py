"""Recording of GrowBench: all plans of an instance as one tree of trainings, with observations and costs."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from esper.growbench.instances import DECISION_POINTS, OPERATOR, RNG_SEEDS, GrowthInstance, Plan, plans_of
from esper.growbench.store import (
    PER_FILE,
    PlanRow,
    RecordingError,
    StepRow,
    append,
    columns_of,
    plan_of,
    rows_of,
    text_of,
)
from esper.leyline import EnvFacts, EsperError
from esper.leyline.factored_actions import IntArray
from esper.run.factories import one_thread
from esper.study.processes import in_processes
from esper.tolaria.env import MorphEnv
from esper.tolaria.plan_tree import run_plans

BIT_SETTINGS: Final = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA")
"""Environment variables that choose the kernels of torch."""
Row = StepRow | PlanRow


class Cell(NamedTuple):
    """Rows of plans of one instance and rng seed."""

    steps: list[StepRow]
    plans: list[PlanRow]


def bits() -> str:
    """Return the settings of this process that determine the last bits of its results."""
    found = (f"{name}={os.environ.get(name, 'unset')}" for name in BIT_SETTINGS)
    return "; ".join([f"torch {torch.__version__}", *found, torch.backends.cpu.get_cpu_capability()])


def record_cell(drawn: GrowthInstance, rng_seed: int, plans: Sequence[Plan]) -> Cell:
    """Train all plans of an instance, sharing what they have in common."""
    with one_thread():
        env = MorphEnv(drawn.task_spec(), rng_seed=rng_seed)
        facts = env.reset()
        rows: dict[tuple[Plan, int], StepRow] = {}
        began = time.process_time()

        def observe(done: Sequence[tuple[int, None]], facts: EnvFacts) -> None:
            nonlocal began
            plan, spent = tuple(step for step, _ in done), time.process_time() - began
            key = {"instance": drawn.instance, "rng_seed": rng_seed, "plan": text_of(plan)}
            rows[plan, facts.epoch] = _step_row(env, facts, **key, cpu_seconds=spent)
            began = time.process_time()

        observe((), facts)
        trees = [tuple((step, None) for step in plan) for plan in plans]
        ended: list[PlanRow] = []
        for finished in run_plans(env, trees, _insert, observe):
            plan = tuple(step for step, _ in finished.plan)
            path = [(tuple(s for s in plan if s < step), step) for step in range(env.task.horizon + 1)]
            seconds = sum(rows[node].cpu_seconds for node in path if node in rows)
            costs = {"flops": env.host.meter.ledger.charged, "cpu_seconds": seconds}
            values = _shared(drawn, PlanRow) | _shared(finished.report, PlanRow) | costs
            ended.append(PlanRow(rng_seed=rng_seed, plan=text_of(plan), bits=bits(), **values))
    return Cell(list(rows.values()), ended)


def _tried(drawn: GrowthInstance, rng_seed: int, plans: Sequence[Plan]) -> Cell | str:
    """Return the cell, or the reason why it cannot be recorded, such as a diverged training."""
    try:
        return record_cell(drawn, rng_seed, plans)
    except EsperError as error:
        return f"instance {drawn.instance}, rng seed {rng_seed}, is not recorded: {error}"


def _insert(env: MorphEnv, _: None) -> IntArray:
    """Return the action that inserts a copy of a block into the first free slot."""
    env.model.births = OPERATOR
    free = int(np.flatnonzero(~env.table.occupied[0])[0])
    name = env.task.slot_config.slot_ids[free]
    return env.action_space.action("germinate", slot=name, blueprint="stack")[0]


def _step_row(env: MorphEnv, facts: EnvFacts, **key: Any) -> StepRow:
    table = env.table
    newest = int(table.seed_id[0].argmax()) if table.occupied.any() else None

    def of_newest(values: NDArray[np.float64]) -> float:
        return math.nan if newest is None else float(values[0, newest])

    return StepRow(
        **key,
        **_shared(facts, StepRow),
        step=facts.epoch,
        val_error=env.host.validation_error() if facts.epoch in DECISION_POINTS else math.nan,
        flops=env.host.meter.ledger.charged,
        contribution=of_newest(table.contribution),
        contribution_error=of_newest(table.contribution_error),
        gradient_ratio=of_newest(table.gradient_norm_ratio),
    )


def _shared(source: Any, kind: type[StepRow] | type[PlanRow]) -> dict[str, Any]:
    """Return the attributes of facts or of a report that are columns of a row."""
    return {name: getattr(source, name) for name in kind.__struct_fields__ if hasattr(source, name)}


def record(
    folder: Path,
    instances: Sequence[GrowthInstance],
    *,
    plans: Callable[[int], list[Plan]] = plans_of,
    processes: int = 1,
    hours: float = math.inf,
    notify: Callable[[str], object] = lambda line: None,
) -> None:
    """Record all cells that the folder does not have yet, cell by cell, until all are recorded or the time is
    over.

    Args:
        folder: Folder of the recording.
        instances: Instances to record, each with all ``RNG_SEEDS``.
        plans: Function that returns the plans of an instance.
        processes: Number of processes, with one thread each.
        hours: Time after which no further cell is begun.
        notify: Function that is called with one line for every recorded cell.

    Raises:
        RecordingError: A file of the recording is damaged or cannot be written, or the recording has other
            bits than this process would compute.
    """
    done = set[tuple[int, int]]()
    if (folder / "plans").exists():
        found = columns_of(folder, PlanRow)
        for recorded in set(found["bits"]):
            _check_bits(recorded)
        done = set(zip(found["instance"].tolist(), found["rng_seed"].tolist(), strict=True))
    cells = [(drawn, rng_seed) for drawn in instances for rng_seed in RNG_SEEDS]
    # The first rng seed of all instances of a file comes first, so that a short recording has all families.
    cells.sort(key=lambda cell: (cell[0].instance // PER_FILE, cell[1]))
    jobs = [(*cell, plans(cell[0].instance)) for cell in cells if (cell[0].instance, cell[1]) not in done]
    until = time.monotonic() + 3600 * hours
    for cell in in_processes(_tried, jobs, processes):
        if isinstance(cell, str):
            notify(cell)
            continue
        append(folder, cell.steps)
        append(folder, cell.plans)  # A cell counts as recorded once its plans are stored, which come last.
        first, seconds = cell.plans[0], sum(row.cpu_seconds for row in cell.steps)
        notify(
            f"instance {first.instance} ({first.task}, width {first.width}), rng seed {first.rng_seed}:"
            f" {len(cell.plans)} plans in {seconds:.0f} CPU s"
        )
        if time.monotonic() > until:
            return


def regenerate(folder: Path, number: int, rng_seed: int, plan: Plan | None = None) -> tuple[int, list[str]]:
    """Train a recorded cell again, or one plan of it alone, and compare all its rows bit for bit.

    Args:
        folder: Folder of the recording.
        number: Number of the instance.
        rng_seed: Rng seed of its trainings.
        plan: Decision points of a single plan; all recorded plans unless given.

    Returns:
        Number of compared rows, and one line for every value that differs.

    Raises:
        RecordingError: The cell or the plan was not recorded, or this process computes other bits.
    """
    plans = rows_of(folder, PlanRow, instance=number, rng_seed=rng_seed)
    wanted = [row for row in plans if plan is None or row.plan == text_of(plan)]
    if not wanted:
        raise RecordingError(
            f"instance {number} with rng seed {rng_seed}"
            + ("" if plan is None else f" and plan '{text_of(plan)}'")
            + f" was not recorded in '{folder}'; recorded plans of it: "
            + (" ".join(f"'{row.plan}'" for row in plans) or "none")
        )
    _check_bits(wanted[0].bits)
    cell = record_cell(wanted[0].drawn, rng_seed, [plan_of(row.plan) for row in wanted])
    again: list[Row] = [*cell.steps, *cell.plans]
    stored: list[Row] = [*rows_of(folder, StepRow, instance=number, rng_seed=rng_seed), *wanted]
    kept = {_key(row): row for row in stored}
    return len(again), [line for row in again for line in _differences(kept.get(_key(row)), row)]


def _check_bits(recorded: str) -> None:
    if recorded != bits():
        raise RecordingError(
            f"the recording was made with {recorded}, and this process computes with {bits()}; use esper"
            " growbench, with the same version of torch"
        )


def _key(row: Row) -> tuple[str, int]:
    return row.plan, row.step if isinstance(row, StepRow) else -1


def _differences(stored: Row | None, again: Row) -> list[str]:
    name = f"plan '{again.plan}'" + (f", step {again.step}" if isinstance(again, StepRow) else "")
    if stored is None:
        return [f"{name} is missing in the recording"]
    return [
        f"{name}: {field} was {old}, is {new}"
        for field in again.__struct_fields__
        if field != "cpu_seconds"
        and (old := repr(getattr(stored, field))) != (new := repr(getattr(again, field)))
    ]
