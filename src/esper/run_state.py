"""The state of a training on disk: saved so that a process killed at any moment leaves one to go on from.

``DIR/checkpoints/iteration-N`` are whole states and ``DIR/checkpoints/latest`` names the one that counts;
it is replaced after a state is complete. A state is sealed with digests of its files, and one that
differs is refused.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Annotated, Final

import msgspec

from esper.config import checked, read_settings
from esper.karn.query import read_rows
from esper.leyline.errors import UNREADABLE, EsperError, RunDirectoryError
from esper.leyline.events import RunRow
from esper.leyline.run_files import TELEMETRY, PartSize, list_parts, part_path
from esper.simic.config import TrainingConfig
from esper.simic.training.vectorized import OPTIMISER_FILE, PROGRESS_FILE, Trainer
from esper.tamiyo.policy.checkpoint import (
    POLICY_FILE,
    SEAL_FILE,
    SHAPE_FILE,
    CheckpointError,
    SaveError,
    check_seal,
    read_bytes,
    seal,
    write_durably,
)

CONFIG_FILE = "config.json"
POINTER = "latest"
STATE_NAME: Final = re.compile(r"iteration-[0-9]{5,}(-again)?")
STATE_FILES: Final = (POLICY_FILE, SHAPE_FILE, OPTIMISER_FILE, PROGRESS_FILE)


class FinishedRunError(EsperError):
    """A run that has no iteration left."""


class Progress(msgspec.Struct):
    """What is asked of a state's progress file."""

    iteration: Annotated[int, msgspec.Meta(ge=1)]
    best_return: float | None
    skipped_in_a_row: Annotated[int, msgspec.Meta(ge=0)]
    task: str
    horizon: int
    config: dict[str, object]
    telemetry: dict[str, PartSize]
    """How far each table was written."""


def save_state(trainer: Trainer, directory: Path, sizes: dict[str, PartSize]) -> None:
    """A whole new state beside the old one, then the pointer, then the old one goes."""
    folder = directory / "checkpoints"
    name = f"iteration-{trainer.iteration:05d}"
    if (folder / POINTER).exists() and (folder / POINTER).read_text() == name:
        name += "-again"  # of a run that ends within the iteration after a checkpoint
    _flush_to_disk(directory / TELEMETRY)
    trainer.save(folder / name, {"telemetry": sizes})
    seal(folder / name, STATE_FILES)
    write_durably(folder / POINTER, name.encode())
    for old in folder.glob("iteration-*"):
        if old.name != name:
            shutil.rmtree(old, ignore_errors=True)


def _flush_to_disk(telemetry: Path) -> None:
    """Rows that a state counts on must outlast a power cut as the state does."""
    try:
        for part in telemetry.glob("*/part-*.jsonl"):
            with part.open("rb") as file:
                os.fsync(file.fileno())
    except OSError as error:
        raise SaveError(f"'{telemetry}' cannot be written: {error.strerror}") from None


def load_latest(trainer: Trainer, config: TrainingConfig, directory: Path) -> dict[str, PartSize]:
    """Load the state that counts and return its sizes of telemetry.

    A run killed before its first state starts again from its own row, or from nothing.
    """
    _check_config(config, directory)
    state = _latest_state(directory / "checkpoints")
    if state is None:
        part = part_path(directory / TELEMETRY / "run", 0, "jsonl")
        written = read_bytes(part) if part.exists() else b""
        return {"run": PartSize(0, len(written))} if written.endswith(b"\n") else {}
    check_seal(state, STATE_FILES)
    progress = _progress_of(state)
    try:
        trainer.load(state)
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"the checkpoint in '{state}' does not fit its run: {reason}") from None
    if trainer.is_over:
        raise FinishedRunError(
            f"the run in '{directory}' has finished its {config.iterations} iterations;"
            " there is nothing to resume"
        )
    _check_telemetry(progress.telemetry, directory)
    return progress.telemetry


def _check_config(config: TrainingConfig, directory: Path) -> None:
    """Refuse a run whose configuration is not the one it began with."""
    for row in read_rows(directory, RunRow)[:1]:
        began = checked(TrainingConfig, row.config).model_dump()
        now = config.model_dump()
        different = [f"{name} was {began[name]}, is {now[name]}" for name in now if began[name] != now[name]]
        if different:
            raise CheckpointError(
                f"'{directory / CONFIG_FILE}' was changed since the run began: {'; '.join(different)}"
            )


def saved_iteration(directory: Path) -> int:
    """The iteration after which a resumed run goes on; 0: it begins again."""
    state = _latest_state(directory / "checkpoints")
    return 0 if state is None else int(state.name.split("-")[1])


def _latest_state(folder: Path) -> Path | None:
    """The state that counts; if the pointer was never written, the newest that is complete."""
    pointer = folder / POINTER
    if not pointer.exists():
        complete = [seal.parent for seal in folder.glob(f"iteration-*/{SEAL_FILE}")]
        return max(complete, key=lambda state: state.name, default=None)
    name = read_bytes(pointer).decode(errors="replace").strip()
    if not STATE_NAME.fullmatch(name):
        raise CheckpointError(f"'{pointer}' must name a state such as iteration-00005; found {name[:80]!r}")
    return folder / name


def _progress_of(state: Path) -> Progress:
    try:
        progress = msgspec.json.decode(read_bytes(state / PROGRESS_FILE), type=Progress)
    except UNREADABLE as error:
        raise CheckpointError(
            f"'{state / PROGRESS_FILE}' is damaged or no checkpoint of this version: {error}"
        ) from None
    if state.name.removesuffix("-again") != f"iteration-{progress.iteration:05d}":
        raise CheckpointError(f"'{state}' holds the state of iteration {progress.iteration}, not of its own")
    return progress


def _check_telemetry(sizes: dict[str, PartSize], directory: Path) -> None:
    """Refuse to continue rows of which some are gone, or cannot be cut off."""
    for table, size in sizes.items():
        parts = list_parts(directory / TELEMETRY / table)
        if len(parts) < size.part:
            raise CheckpointError(
                f"'{directory / TELEMETRY / table}' lost rows since the checkpoint: {len(parts)} of"
                f" {size.part} closed parts are left"
            )
        later = [path for number, path in parts.items() if number >= size.part and path.suffix == ".parquet"]
        if later:
            raise CheckpointError(f"'{later[0]}' is newer than the checkpoint; a closed part cannot be cut")
        part = part_path(directory / TELEMETRY / table, size.part, "jsonl")
        found = part.stat().st_size if part.exists() else 0
        if found < size.bytes:
            raise CheckpointError(
                f"'{part}' lost rows since the checkpoint: {found} of {size.bytes} bytes are left"
            )


def config_of_run(directory: Path) -> TrainingConfig:
    """The configuration of a training run, as it was written at its start."""
    if not (directory / CONFIG_FILE).exists():
        raise RunDirectoryError(f"'{directory}' is no training run: it has no {CONFIG_FILE}")
    return checked(TrainingConfig, read_settings(directory / CONFIG_FILE))
