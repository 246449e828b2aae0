"""Run directory of a training by ``esper.grow``: one file of rows per epoch, and a checkpoint.

The checkpoint is that of the last written epoch: a killed training continues after that epoch, and rows
written after the checkpoint are removed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper.files.atomic_write import SaveError
from esper.files.row_files import RowMark
from esper.karn.run import open_run
from esper.kasmina.transaction import uninterrupted
from esper.leyline import EsperError, EventSink, RunDirectoryError
from esper.nissa.writer import RunWriter
from esper.run.checkpoint_file import CHECKPOINT, read_checkpoint, write_checkpoint
from esper.run.provenance import changed_settings, run_row
from esper.run.row_sink import RowSink

if TYPE_CHECKING:
    from esper.kasmina.network import MorphogeneticModel


class GrowDirectory(AbstractContextManager["GrowDirectory"]):
    """Run directory of one training by ``esper.grow``, with writer and checkpoint.

    Args:
        path: Path of the run directory, which must not exist unless the training is resumed.
        resume: Whether to continue from the checkpoint in the run directory.

    Raises:
        RunDirectoryError: The run directory has no checkpoint to resume from, its checkpoint is damaged, or
            it exists already.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        if resume and not (path / CHECKPOINT).is_file():
            raise RunDirectoryError(
                f"'{path}' holds no {CHECKPOINT} to resume from; remove what is there and leave resume out"
            )
        if not resume and path.exists():
            raise RunDirectoryError(
                f"'{path}' exists and is not overwritten; pass resume=True or another out="
            )
        self._checkpoint = read_checkpoint(path) if resume else None
        self.unsaved: str | None = None
        """Error message if a file of the run could not be written by the end of the training."""
        self._opened = ExitStack()

    def __exit__(self, *error: Any) -> None:
        """Close the writer and store its error message if rows or checkpoint could not be written."""
        try:
            with uninterrupted():
                self._opened.__exit__(*error)
        except SaveError as failure:
            self.unsaved = str(failure)

    def begin(
        self,
        network: MorphogeneticModel,
        controller: str,
        settings: Mapping[str, Any],
        device: str,
        load: Callable[[dict[str, Any]], None],
    ) -> EventSink:
        """Write the run row of a new run, or reopen the run at its checkpoint; return the sink for further
        rows.

        Args:
            network: Network that is trained.
            controller: Name of the controller.
            settings: Settings of the run, which must not change when the run is resumed.
            device: Name of the device.
            load: Function that is called with the checkpoint of a resumed run, before rows are removed.

        Raises:
            EsperError: The run to resume was started with other settings, or its checkpoint does not fit; no
                file was changed.
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
        if self._checkpoint is not None:
            # The run is checked before the writer is opened, because the writer deletes the rows after the
            # checkpoint.
            changed = changed_settings(open_run(self.path).row.config, run.config)
            for name, (old, new) in changed.items():
                raise EsperError(
                    f"'{self.path}' was begun with {name}={old!r}, and is to go on with"
                    f" {new!r}; pass what it was begun with, or begin anew in another out="
                )
            try:
                mark = RowMark(*self._checkpoint["rows"])
                load(self._checkpoint)
            except EsperError:
                raise
            except Exception as error:
                raise RunDirectoryError(
                    f"'{self.path / CHECKPOINT}' does not fit this training ({type(error).__name__}:"
                    f" {error}); pass the network, optimizer and loaders that the run was begun with"
                ) from error
        with uninterrupted():
            self._writer = self._opened.enter_context(RunWriter(self.path, resume_from=mark))
        sink = RowSink(run, self._writer)
        sink.begin(self.path, is_resumed=self._checkpoint is not None)
        return sink

    def rows_of(self, epoch: int, *, is_last: bool = False) -> AbstractContextManager[None]:
        """Write the rows that are emitted inside the context as the rows of one epoch: all of them or
        none."""
        return self._writer.iteration(epoch, is_last=is_last)

    def save(self, state: Mapping[str, Any]) -> None:
        """Write the checkpoint of the epoch whose rows were written last."""
        with self._writer.attempt("checkpoint"), self._writer.checkpoint() as mark:
            write_checkpoint(self.path, {**state, "rows": tuple(mark)})
