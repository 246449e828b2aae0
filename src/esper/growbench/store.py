"""Rows of GrowBench as Parquet files: one row for every training step, and one for every finished plan."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar, get_type_hints

import duckdb
import msgspec
import numpy as np
from numpy.typing import NDArray

from esper.files.atomic_write import make_folder, partial_of, save_errors
from esper.growbench.instances import GrowthInstance
from esper.leyline import EsperError

PACKAGED: Final = Path(__file__).parent / "recorded"
"""Folder of the recording that is part of the package."""
PER_FILE: Final = 10
"""Number of instances in a file."""
Columns = Mapping[str, NDArray[Any]]
"""Arrays of equal length, by the name of the column."""
_SQL: Final = {"int": "BIGINT", "float": "DOUBLE", "str": "VARCHAR"}


class RecordingError(EsperError):
    """Error: a recording is missing or damaged, or does not contain what was asked for."""


class StepRow(msgspec.Struct, frozen=True):
    """Observation after a training step of a plan; NaN for what was not measured."""

    instance: int
    rng_seed: int
    plan: str
    """Decision points at which a block was inserted so far, joined by commas."""
    step: int
    """Number of training steps so far."""
    train_loss: float
    train_score: float
    val_loss: float
    val_score: float
    val_error: float
    """Standard error of the validation loss over the validation samples; at decision points only."""
    host_gradient_norm: float
    """Mean norm of the gradient of the host over the minibatches of the step, before clipping."""
    minibatches: int
    minibatches_left: float
    params: int
    flops: int
    """FLOPs so far that count against the budget."""
    candidate_cost: float
    """FLOPs of training a new block, divided by those of training the network."""
    contribution: float
    """Contribution of the newest block in points of the validation score, when it was last measured."""
    contribution_error: float
    gradient_ratio: float
    """Gradient norm of the newest block, divided by that of the host."""
    cpu_seconds: float
    """CPU seconds of the step, validation included."""


class PlanRow(msgspec.Struct, frozen=True):
    """End of a plan: losses after the decay of the learning rate, and costs."""

    instance: int
    rng_seed: int
    plan: str
    family: str
    task: str
    width: int
    rate: float
    batch_size: int
    data_share: float
    budget: int
    val_loss: float
    test_loss: float
    val_score: float
    test_score: float
    params: int
    flops: int
    cpu_seconds: float
    """CPU seconds of all steps of the plan, those that it shares with other plans included."""
    rollbacks: int
    bits: str
    """Settings that determine the last bits of all numbers, such as the version of torch."""

    @property
    def drawn(self) -> GrowthInstance:
        """Instance of the plan, as it was drawn for the recording."""
        return GrowthInstance(*(getattr(self, name) for name in GrowthInstance.__struct_fields__))


R = TypeVar("R", StepRow, PlanRow)
_FOLDERS: Final = {StepRow: "steps", PlanRow: "plans"}
_KEYS: Final = {StepRow: "instance, rng_seed, plan, step", PlanRow: "instance, rng_seed, plan"}


def text_of(plan: Sequence[int]) -> str:
    """Return a plan as it is stored."""
    return ",".join(map(str, plan))


def plan_of(text: str) -> tuple[int, ...]:
    """Return the decision points of a stored plan.

    Raises:
        RecordingError: The text is no list of steps.
    """
    if text and not all(step.isdecimal() for step in text.split(",")):
        raise RecordingError(f"plan '{text[:80]}' is no list of steps; write it as 5,14")
    return tuple(map(int, text.split(","))) if text else ()


def append(folder: Path, rows: Sequence[R]) -> None:
    """Add the rows of one instance and rng seed to their file, in place of earlier rows of the same.

    The file is replaced as a whole, so that a reader or a crash finds the old file or the new one.

    Raises:
        RecordingError: The file cannot be written, or is damaged.
    """
    kind, first = type(rows[0]), rows[0]
    path = folder / _FOLDERS[kind] / f"{first.instance // PER_FILE:03d}.parquet"
    types = json.dumps({name: _SQL[hint.__name__] for name, hint in get_type_hints(kind).items()})
    table = f"SELECT unnest(from_json_strict(line, '{types}')) FROM (SELECT unnest(?::VARCHAR[]) AS line)"
    values: list[Any] = [[msgspec.json.encode(row).decode() for row in rows]]
    if path.exists():
        old = f"SELECT * FROM read_parquet({_quoted(path)}) WHERE (instance, rng_seed) != (?, ?)"
        table = f"{old} UNION ALL {table}"
        values = [first.instance, first.rng_seed, *values]
    with save_errors(path, RecordingError):
        make_folder(path.parent)
        partial = partial_of(path)
        try:
            with duckdb.connect(config={"threads": "1"}) as database:
                database.execute(
                    f"COPY (SELECT * FROM ({table}) ORDER BY {_KEYS[kind]}) TO {_quoted(partial)}"
                    " (FORMAT parquet, COMPRESSION zstd)",
                    values,
                )
            os.replace(partial, path)
        except duckdb.Error as error:
            raise _damage(path, error) from None
        finally:
            partial.unlink(missing_ok=True)


def columns_of(folder: Path, kind: type[StepRow] | type[PlanRow]) -> Columns:
    """Return all rows of a kind, sorted by instance, rng seed, plan and step, as one array per column.

    Raises:
        RecordingError: There is no recording in the folder, or a file is damaged.
    """
    paths = sorted((folder / _FOLDERS[kind]).glob("*.parquet"))
    if not paths:
        raise RecordingError(
            f"'{folder}' has no recording; give the folder of one, or record one with esper growbench record"
            " --out FOLDER"
        )
    names = ", ".join(kind.__struct_fields__)
    found: list[Columns] = []
    for path in paths:
        try:
            with duckdb.connect(config={"threads": "1"}) as database:
                table = f"SELECT {names} FROM read_parquet({_quoted(path)}) ORDER BY {_KEYS[kind]}"
                columns = database.execute(table).fetchnumpy()
        except duckdb.Error as error:
            raise _damage(path, error) from None
        found.append({name: np.ma.filled(columns[name], np.nan) for name in kind.__struct_fields__})
    return {name: np.concatenate([columns[name] for columns in found]) for name in found[0]}


def rows_of(folder: Path, kind: type[R], **where: int) -> list[R]:
    """Return the rows of a kind whose columns have the values of ``where``."""
    columns = columns_of(folder, kind)
    chosen = np.full(len(columns["plan"]), True)
    for name, value in where.items():
        chosen &= columns[name] == value
    return [kind(*row) for row in zip(*(c[chosen].tolist() for c in columns.values()), strict=True)]


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "''") + "'"


def _damage(path: Path, error: duckdb.Error) -> RecordingError:
    reason = str(error).splitlines()[0]
    return RecordingError(
        f"'{path}' is damaged ({reason}); restore it, or delete it and record its cells again"
    )
