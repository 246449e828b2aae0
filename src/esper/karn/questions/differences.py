"""How the configurations of runs differ, key by key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from esper.karn.run import Run

ABSENT: Final = "–"
BESIDE: Final = (
    "task",
    "controller",
    "rng_seed",
    "data_hash",
    "git_revision",
    "host_params",
    "horizon",
    "envs",
)
"""What else of a run's own row tells runs apart."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One key whose value is not the same in all runs."""

    key: str
    """Nested keys are joined by dots."""
    values: tuple[Any, ...]
    """In the order of the runs; ``ABSENT`` where a run has no such key."""


def differences(runs: Mapping[str, Run]) -> tuple[Difference, ...]:
    """Every key of configuration, versions and hardware that differs, in order of appearance."""
    described = [dict(_described(run)) for run in runs.values()]
    keys = dict.fromkeys(key for one in described for key in one)
    found = (Difference(key, tuple(one.get(key, ABSENT) for one in described)) for key in keys)
    return tuple(one for one in found if any(value != one.values[0] for value in one.values))


def _described(run: Run) -> Iterator[tuple[str, Any]]:
    row = run.row
    for name in BESIDE:
        yield name, getattr(row, name)
    for name, value in (("config", row.config), ("versions", row.versions), ("hardware", row.hardware)):
        yield from flat(name, value)


def flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A setting, or the settings within it, each with its keys joined by dots."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from flat(f"{key}.{name}", inner)
    else:
        yield key, value
