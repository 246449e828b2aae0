"""File of a checkpoint, in the run directories of ``esper train`` and ``esper.grow``.

A new checkpoint replaces the old one atomically, so a process killed at any time leaves a complete one. The
file begins with the SHA-256 of its content, and reading it runs no code from it.
"""

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from esper.files.atomic_write import write_durably
from esper.leyline import RunDirectoryError

CHECKPOINT: Final = "checkpoint.pt"


def write_checkpoint(directory: Path, state: Mapping[str, Any]) -> None:
    """Write the checkpoint of a run; raises ``SaveError`` if that is not possible."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    content = buffer.getvalue()
    write_durably(directory / CHECKPOINT, _digest(content) + content)


def read_checkpoint(directory: Path) -> dict[str, Any]:
    """Return the state that ``write_checkpoint`` wrote, with all tensors on the CPU.

    Raises:
        RunDirectoryError: The file is missing or damaged.
    """
    path = directory / CHECKPOINT
    begin = len(_digest(b""))
    try:
        content = path.read_bytes()
        if content[:begin] != _digest(content[begin:]):
            raise ValueError("its digest differs")
        state = torch.load(io.BytesIO(content[begin:]), map_location="cpu", weights_only=True)
        return dict(state)
    except Exception as error:  # For the content of another program torch raises many classes of exceptions.
        reason = str(error).partition("\n")[0]
        raise RunDirectoryError(
            f"'{path}' is damaged or was not written by this version of esper, so the run cannot be resumed"
            f" ({reason}); its rows are still readable, and another out= begins a new run"
        ) from error


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
