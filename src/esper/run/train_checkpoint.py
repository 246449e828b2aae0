"""Resuming a policy training: its configuration, and the checks and the loading of its checkpoint."""

from pathlib import Path
from typing import Final

import msgspec

from esper.files.row_files import TELEMETRY, RowMark, check_layout, row_files
from esper.karn.run import read_rows
from esper.leyline import EsperError, RunDirectoryError, RunRow, UpdateRow
from esper.run.checkpoint_file import CHECKPOINT, read_checkpoint
from esper.run.provenance import changed_settings
from esper.run.run_config import checked, read_settings
from esper.simic.config import TrainingConfig
from esper.simic.training.trainer import Trainer, TrainState

CONFIG_FILE: Final = "config.json"
OLD_FOLDER: Final = "checkpoints"
"""Folder in which earlier versions of Esper stored checkpoints."""


class FinishedRunError(EsperError):
    """Error: the run to resume has completed all its iterations."""


def load_checkpoint(trainer: Trainer, config: TrainingConfig, directory: Path) -> RowMark:
    """Load the checkpoint of a run into ``trainer``, and return the position of the row writer at that
    checkpoint.

    A run that was killed before its first checkpoint is resumed from the beginning.

    Args:
        trainer: New trainer with the configuration of the run.
        config: Configuration of the resumed run, which must equal that of the checkpoint.
        directory: Run directory of the training.

    Raises:
        RunDirectoryError: The checkpoint is damaged, or does not match the configuration or the rows of the
            run.
        FinishedRunError: The run has no iterations left.
    """
    for row in read_rows(directory, RunRow)[:1]:
        before = checked(TrainingConfig, row.config).model_dump()
        changed = changed_settings(before, config.model_dump()).items()
        if different := [f"{name} was {old}, is {new}" for name, (old, new) in changed]:
            raise RunDirectoryError(f"'{directory / CONFIG_FILE}' was changed: {'; '.join(different)}")
    path = directory / CHECKPOINT
    if not path.exists():
        if (directory / OLD_FOLDER).exists():
            raise RunDirectoryError(
                f"'{directory / OLD_FOLDER}' was written by an earlier version of esper; resume with that one"
            )
        return RowMark(0, 0.0)
    try:
        state = msgspec.convert(read_checkpoint(directory), TrainState)
        if different := list(changed_settings(state.settings, trainer.settings)):
            raise RunDirectoryError(f"'{path}' belongs to another run; different: {', '.join(different)}")
        trainer.load(state)
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise RunDirectoryError(f"the checkpoint '{path}' does not fit its run: {reason}") from None
    if trainer.is_over:
        done = f"has finished its {config.iterations} iterations; there is nothing to resume"
        raise FinishedRunError(f"the run in '{directory}' {done}")
    _check_telemetry(state.rows, directory)
    return state.rows


def _check_telemetry(mark: RowMark, directory: Path) -> None:
    """Raise an error if rows before the checkpoint are missing, or rows after the checkpoint cannot be
    deleted.
    """
    found = row_files(directory / TELEMETRY)
    iterations = [row.iteration for row in read_rows(directory, UpdateRow)]
    if found.last < mark.iteration or (mark.iteration > 0 and mark.iteration not in iterations):
        raise RunDirectoryError(
            f"'{directory / TELEMETRY}' lost rows since the checkpoint, which counts on those of iteration"
            f" {mark.iteration}"
        )
    for span in found.spans:
        if span.first <= mark.iteration < span.last:
            raise RunDirectoryError(f"'{span.path}' is newer than the checkpoint; Parquet cannot be cut")


def config_of_run(directory: Path) -> TrainingConfig:
    """Return the configuration of a policy training, from the file that was written at the start of its
    run."""
    if not (directory / CONFIG_FILE).exists():
        raise RunDirectoryError(f"'{directory}' is no training run: it has no {CONFIG_FILE}")
    check_layout(directory / TELEMETRY)
    return checked(TrainingConfig, read_settings(directory / CONFIG_FILE))
