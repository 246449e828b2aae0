"""Directory of a training by ``esper.grow``: one file of rows per epoch, and a checkpoint.

The checkpoint belongs to the last written epoch: a killed training continues after that epoch, and rows
written after the checkpoint are removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from esper.files.row_files import RowMark
from esper.karn.run import read_rows
from esper.kasmina.network_file import save
from esper.leyline import EsperError, EventSink, RunDirectoryError, RunRow
from esper.nissa.writer import RunWriter
from esper.run.provenance import changed_settings, run_row
from esper.run.row_sink import RowSink

if TYPE_CHECKING:
    from esper.kasmina.network import MorphogeneticModel

CHECKPOINT: Final = "checkpoint.pt"


class GrowDirectory(AbstractContextManager["GrowDirectory"]):
    """Run directory of one training by ``esper.grow``.

    Args:
        path: Directory; it must not exist unless the training is resumed.
        resume: Continue from the checkpoint in ``path``.

    Raises:
        RunDirectoryError: There is no checkpoint to resume from, or the directory exists already.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        found = path / CHECKPOINT
        if resume and not found.is_file():
            raise RunDirectoryError(
                f"'{path}' holds no {CHECKPOINT} to resume from; remove what is there and leave resume out"
            )
        if not resume and path.exists():
            raise RunDirectoryError(
                f"'{path}' exists and is not overwritten; pass resume=True or another out="
            )
        self.checkpoint: dict[str, Any] | None = torch.load(found, weights_only=True) if resume else None
        self._opened = ExitStack()

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def begin(
        self, network: MorphogeneticModel, controller: str, settings: Mapping[str, Any], device: str
    ) -> EventSink:
        """Write the run's row, or reopen the run at its checkpoint; return the sink for further rows.

        Raises:
            EsperError: The run was started with other settings.
        """
        run = run_row(
            network.action_space,
            name=self.path.name,
            task=type(network.host).__name__,
            controller=controller,
            rng_seed=None,
            config={**settings, "episodes": 1},
            data_hash=None,
            host_params=sum(parameter.numel() for parameter in network.host_parameters()),
            horizon=settings["epochs"],
            metric="val_loss",
            iterations=None,
            envs=1,
            devices=[device],
        )
        mark = None
        if self.checkpoint is not None:
            # Settings are compared before the writer is opened, because the writer removes rows after the
            # checkpoint.
            changed = changed_settings(read_rows(self.path, RunRow)[0].config, run.config)
            for name, (old, new) in changed.items():
                raise EsperError(
                    f"'{self.path}' was begun with {name}={old!r}, and is to go on with"
                    f" {new!r}; pass what it was begun with, or begin anew in another out="
                )
            mark = RowMark(*self.checkpoint["rows"])
        self._writer = self._opened.enter_context(RunWriter(self.path, resume_from=mark))
        sink = RowSink(run, self._writer)
        if self.checkpoint is None:
            with self.rows_of(0):
                sink.emit(run)
        else:
            sink.replay(self.path)
        return sink

    def rows_of(self, epoch: int, *, is_last: bool = False) -> AbstractContextManager[None]:
        """Write the rows emitted inside the context as the rows of one epoch, all of them or none."""
        return self._writer.iteration(epoch, is_last=is_last)

    def save(self, state: Mapping[str, Any]) -> None:
        """Write the checkpoint of the last epoch that was written."""
        with self._writer.checkpoint() as mark:
            save({**state, "rows": tuple(mark)}, self.path / CHECKPOINT)
