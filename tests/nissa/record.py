"""Recorder of the good and deliberately broken trainings in tests/nissa/recorded.

``python -m tests.nissa.record NAME …`` repeats a training and writes ``recorded/NAME.jsonl``: a header line,
then one line per telemetry row with the name of its table. A training takes minutes; its rows differ slightly
between machines.
"""

import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from unittest import mock

import msgspec

from esper.karn.run import read_rows
from esper.leyline.columns import TABLE_OF
from esper.leyline.rows import TABLES, AlertRow, EpisodeRow, Row, RunRow, UpdateRow
from esper.nissa.alert_monitor import AlertMonitor
from esper.nissa.alert_rules import GOVERNOR_RULES
from esper.run.policy_training import train
from esper.simic.config import TrainingConfig
from esper.simic.rewards import families
from esper.simic.rewards.families import FAMILIES, Array, RewardInputs

FOLDER: Final = Path(__file__).parent / "recorded"


def flip_the_sign() -> AbstractContextManager[object]:
    """Flip the sign of the reward for a score above that of the twin."""
    paired = FAMILIES["paired"]
    right = paired.potentials["lead"]

    def wrong(inputs: RewardInputs) -> Array:
        return -right(inputs)

    flipped = replace(paired, potentials={**paired.potentials, "lead": wrong})
    return mock.patch.dict(FAMILIES, {"paired": flipped})


def charge_removals() -> AbstractContextManager[object]:
    """Raise the reward penalty for removing a seed to the value of a hundred points of score."""
    return mock.patch.object(families, "CHURN_COST", 1.0)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Settings of a recorded training, and the telemetry tables to record."""

    settings: Mapping[str, Any]
    tables: tuple[type[Row], ...]
    breakage: Callable[[], AbstractContextManager[object]] = field(default=nullcontext)


SMALL: Final = MappingProxyType(
    {"envs": 4, "iterations": 6, "evaluate_every": 100, "evaluate_episodes": 2, "detail": "summary"}
)
RECIPES: Final[Mapping[str, Recipe]] = {
    "good": Recipe(
        {**SMALL, "envs": 8, "iterations": 16, "evaluate_every": 8, "evaluate_episodes": 4, "rng_seed": 1},
        (RunRow, EpisodeRow, UpdateRow),
    ),
    "exploding": Recipe({**SMALL, "learning_rate": 0.05}, (RunRow, UpdateRow)),
    "flipped": Recipe({**SMALL, "steps": 10}, (RunRow, EpisodeRow), flip_the_sign),
    "shaped": Recipe(
        {**SMALL, "steps": 10, "reward_family": "contribution"}, (RunRow, EpisodeRow), charge_removals
    ),
}


def record(name: str) -> None:
    """Run the named training and write its telemetry rows to ``recorded/NAME.jsonl``."""
    recipe = RECIPES[name]
    with recipe.breakage(), tempfile.TemporaryDirectory() as folder:
        train(TrainingConfig(**recipe.settings, detail="full"), Path(folder) / name)
        rows = [row for kind in recipe.tables for row in read_rows(Path(folder) / name, kind)]
    rows.sort(key=lambda row: row.t)
    write(name, f"python -m tests.nissa.record {name}", rows)


def write(name: str, made_by: str, rows: Iterable[Row]) -> None:
    FOLDER.mkdir(exist_ok=True)
    lines = [{"made_by": made_by}, *({"table": TABLE_OF[type(row)], "row": row} for row in rows)]
    (FOLDER / f"{name}.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def read(name: str) -> Iterator[Row]:
    """Yield the rows of a recorded training in the order in which they were written."""
    _, *lines = (FOLDER / f"{name}.jsonl").read_bytes().splitlines()
    for line in lines:
        found = msgspec.json.decode(line)
        yield msgspec.convert(found["row"], TABLES[found["table"]])


def replay(rows: Iterable[Row]) -> list[AlertRow]:
    """Return the alerts that the alert rules raise or clear for a run's rows, and the governor's alerts among
    the rows."""
    run, *others = rows
    assert isinstance(run, RunRow)
    watch = AlertMonitor(run)
    alerts: list[AlertRow] = []
    for row in others:
        if isinstance(row, AlertRow) and row.rule in GOVERNOR_RULES and row.event == "raised":
            alerts.append(row)
        alerts += watch.take(row)
    return alerts


if __name__ == "__main__":
    for given in sys.argv[1:]:
        record(given)
