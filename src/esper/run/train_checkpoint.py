"""Checkpoints of a policy training: a process killed at any time leaves a complete checkpoint.

Folders ``DIR/checkpoints/iteration-N`` are checkpoints; the file ``DIR/checkpoints/latest`` has the name of
the current one, and is replaced after a new checkpoint is complete. The seal of a checkpoint has the digests
of its files; a checkpoint that does not match its seal is refused.
"""

import re
import shutil
from pathlib import Path
from typing import Final

from esper.files.atomic_write import write_durably
from esper.files.row_files import TELEMETRY, RowMark, check_layout, row_files
from esper.karn.run import read_rows
from esper.leyline import EsperError, RunDirectoryError, RunRow, UpdateRow
from esper.run.provenance import changed_settings
from esper.run.run_config import checked, read_settings
from esper.simic.config import TrainingConfig
from esper.simic.training.trainer import OPTIMISER_FILE, PROGRESS_FILE, Trainer
from esper.tamiyo.policy import checkpoint
from esper.tamiyo.policy.checkpoint import CheckpointError

CONFIG_FILE = "config.json"
CHECKPOINTS = "checkpoints"
POINTER = "latest"
STATE_NAME: Final = re.compile(r"iteration-[0-9]{5,}(-again)?")
STATE_FILES: Final = (checkpoint.POLICY_FILE, checkpoint.SHAPE_FILE, OPTIMISER_FILE, PROGRESS_FILE)


class FinishedRunError(EsperError):
    """Error: the run to resume has completed all its iterations."""


def save_state(trainer: Trainer, directory: Path, mark: RowMark) -> None:
    """Write a new checkpoint, then make it the current checkpoint, then delete the old one."""
    folder = directory / CHECKPOINTS
    name = f"iteration-{trainer.iteration:05d}"
    if (folder / POINTER).exists() and (folder / POINTER).read_text() == name:
        # A run that stops before it completes another iteration saves a second checkpoint with the same
        # iteration number.
        name += "-again"
    trainer.save(folder / name, mark)
    checkpoint.seal(folder / name, STATE_FILES)
    write_durably(folder / POINTER, name.encode())
    for old in folder.glob("iteration-*"):
        if old.name != name:
            shutil.rmtree(old, ignore_errors=True)


def load_latest(trainer: Trainer, config: TrainingConfig, directory: Path) -> RowMark:
    """Load the current checkpoint into ``trainer``, and return the position of the row writer at that
    checkpoint.

    A run that was killed before its first checkpoint is resumed from the beginning.

    Args:
        trainer: New trainer with the configuration of the run.
        config: Configuration of the resumed run, which must equal that of the checkpoint.
        directory: Run directory of the training.

    Raises:
        CheckpointError: The checkpoint is damaged, or does not match the configuration or the rows of the
            run.
        FinishedRunError: The run has no iterations left.
    """
    for row in read_rows(directory, RunRow)[:1]:
        before = checked(TrainingConfig, row.config).model_dump()
        changed = changed_settings(before, config.model_dump()).items()
        if different := [f"{name} was {old}, is {new}" for name, (old, new) in changed]:
            raise CheckpointError(f"'{directory / CONFIG_FILE}' was changed: {'; '.join(different)}")
    state = _latest_state(directory / CHECKPOINTS)
    if state is None:
        return RowMark(0, 0.0)
    checkpoint.check_seal(state, STATE_FILES)
    try:
        mark = trainer.load(state)
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"the checkpoint in '{state}' does not fit its run: {reason}") from None
    if state.name.removesuffix("-again") != f"iteration-{trainer.iteration:05d}":
        raise CheckpointError(f"'{state}' holds the state of iteration {trainer.iteration}, unlike its name")
    if trainer.is_over:
        done = f"has finished its {config.iterations} iterations; there is nothing to resume"
        raise FinishedRunError(f"the run in '{directory}' {done}")
    _check_telemetry(mark, directory)
    return mark


def _latest_state(folder: Path) -> Path | None:
    """Return the folder of the current checkpoint; if the file ``latest`` is missing, that of the newest
    complete checkpoint, or None.
    """
    pointer = folder / POINTER
    if not pointer.exists():
        complete = [path.parent for path in folder.glob(f"iteration-*/{checkpoint.SEAL_FILE}")]
        return max(complete, key=lambda state: state.name, default=None)
    name = checkpoint.read_bytes(pointer).decode(errors="replace").strip()
    if not STATE_NAME.fullmatch(name):
        raise CheckpointError(f"'{pointer}' must name a state such as iteration-00005; found {name[:80]!r}")
    return folder / name


def _check_telemetry(mark: RowMark, directory: Path) -> None:
    """Raise an error if rows before the checkpoint are missing, or rows after the checkpoint cannot be
    deleted.
    """
    found = row_files(directory / TELEMETRY)
    iterations = [row.iteration for row in read_rows(directory, UpdateRow)]
    if found.last < mark.iteration or (mark.iteration > 0 and mark.iteration not in iterations):
        raise CheckpointError(
            f"'{directory / TELEMETRY}' lost rows since the checkpoint, which counts on those of iteration"
            f" {mark.iteration}"
        )
    for span in found.spans:
        if span.first <= mark.iteration < span.last:
            raise CheckpointError(f"'{span.path}' is newer than the checkpoint; Parquet cannot be cut")


def config_of_run(directory: Path) -> TrainingConfig:
    """Return the configuration of a policy training, from the file that was written at the start of its
    run."""
    if not (directory / CONFIG_FILE).exists():
        raise RunDirectoryError(f"'{directory}' is no training run: it has no {CONFIG_FILE}")
    check_layout(directory / TELEMETRY)
    return checked(TrainingConfig, read_settings(directory / CONFIG_FILE))
