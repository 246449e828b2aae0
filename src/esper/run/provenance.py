"""Provenance of a run: git revision, library versions, machine and settings, and the run row that stores
them."""

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from esper.leyline import HEAD_NAMES, OP_NAMES, SCHEMA_VERSION, STAGE_NAMES, ActionSpace, RunRow

LIBRARIES = ("torch", "numpy", "pydantic", "msgspec", "rich", "safetensors")


def git_revision() -> str | None:
    """Return the git revision of Esper, with ``-dirty`` if there are uncommitted changes; None outside a
    checkout."""
    folder = Path(__file__).parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def versions() -> dict[str, str]:
    """Return the versions of Python, Esper and the libraries that Esper uses."""
    return {"python": platform.python_version(), **{name: version(name) for name in ("esper", *LIBRARIES)}}


def hardware() -> dict[str, Any]:
    """Return the properties of the machine that can change numerical results."""
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda_devices": torch.cuda.device_count(),
    }


def run_row(space: ActionSpace, **columns: Any) -> RunRow:
    """Return the run row of a run that starts now.

    Provenance and the names to which indices refer are filled in; ``columns`` are the other columns of the
    run row.
    """
    return RunRow(
        schema_version=SCHEMA_VERSION,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        git_revision=git_revision(),
        versions=versions(),
        hardware=hardware(),
        slots=list(space.slot_config.slot_ids),
        ops=list(OP_NAMES),
        heads=list(HEAD_NAMES),
        blueprints=list(space.blueprint_names),
        stages=list(STAGE_NAMES),
        head_choices=[list(names) for names in space.choice_names],
        **columns,
    )


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ between two configurations, by name, each as (before, now); a missing
    setting counts as None."""
    pairs = {name: (before.get(name), now.get(name)) for name in (*before, *now)}
    return {name: (old, new) for name, (old, new) in pairs.items() if old != new}
