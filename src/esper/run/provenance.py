"""Provenance of a run: git revision, versions of libraries, machine."""

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from esper.kasmina.native import kernels

LIBRARIES = ("torch", "numpy", "pydantic", "msgspec", "rich", "safetensors")


def git_revision() -> str | None:
    """Return the git revision, with ``-dirty`` if there are uncommitted changes; None outside a checkout."""
    folder = Path(__file__).parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def versions() -> dict[str, str]:
    """Return the versions of Python, Esper and its numerical libraries."""
    return {"python": platform.python_version(), **{name: version(name) for name in ("esper", *LIBRARIES)}}


def hardware() -> dict[str, Any]:
    """Return the properties of the machine that can change numerical results."""
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "kernels": kernels().description,
        "cuda_devices": torch.cuda.device_count(),
    }
