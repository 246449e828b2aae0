"""Fault injection at every change to a file, for one tiny run of each kind of command."""

import os
import sys
import traceback
from pathlib import Path

import pytest
import torch

from esper.nissa import writer as writer_module
from tests.faults.commands import COMMANDS, register_tasks
from tests.faults.faults import explore
from tests.integration.training import forked, prepare


def search(kind: str, folder: Path) -> None:
    """Inject all faults into one kind of command in this child process; exit with 1 if a check fails."""
    prepare(folder / "cache")
    register_tasks(dict.__setitem__)
    torch.set_num_threads(1)
    if kind == "grow":
        writer_module.LINES_BYTES = 500  # type: ignore[misc]  # Rows are converted to Parquet at every checkpoint.
    try:
        found = explore(COMMANDS[kind], folder / "search")
        sys.stderr.write(f"{kind}: {found}\n")
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


@pytest.mark.parametrize("kind", COMMANDS)
def test_no_data_are_lost_by_a_crash_or_disk_error_at_any_change_to_a_file(kind: str, tmp_path: Path) -> None:
    child = forked(search, kind, tmp_path)
    child.join()
    assert child.exitcode == 0
