"""What a run was configured with and where it comes from, as names and texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from esper.karn import notation
from esper.leyline.events import RunRow

Settings = list[tuple[str, str]]
"""Names and texts in order; settings within settings have names with dots."""


def configuration(row: RunRow) -> Settings:
    """All settings of the run."""
    return list(_flat(row.config))


def provenance(row: RunRow) -> Settings:
    """Where, when and from what the run was made."""
    return [
        ("started", row.started),
        ("rng seed", str(row.rng_seed)),
        ("git revision", row.git_revision or notation.UNKNOWN),
        ("data hash", row.data_hash),
        ("slots", " ".join(row.slots)),
        ("host parameters", notation.count(row.host_params)),
        *((f"version of {name}", text) for name, text in row.versions.items()),
        *((f"machine: {name}", text) for name, text in _flat(row.hardware)),
    ]


def text_of(value: object) -> str:
    """A setting as it would be written."""
    return "none" if value is None else notation.written(value)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, text_of(value)
