"""Comparison of the settings of a run that is resumed with those it was started with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esper.tamiyo.policy.checkpoint import CheckpointError


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, by name, each as (before, now); a missing setting counts as None."""
    pairs = {name: (before.get(name), now.get(name)) for name in (*before, *now)}
    return {name: (old, new) for name, (old, new) in pairs.items() if old != new}


def check_same_settings(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to resume a run with other settings: its rows and weights would mix two configurations.

    Args:
        path: File or run directory that holds the settings, for the error message.
        before: Settings that the run was started with.
        now: Settings that the run is to be resumed with.

    Raises:
        CheckpointError: At least one setting differs; the message lists all of them.
    """
    different = [f"{name} was {old}, is {new}" for name, (old, new) in changed_settings(before, now).items()]
    if different:
        raise CheckpointError(f"'{path}' was changed: {'; '.join(different)}")
