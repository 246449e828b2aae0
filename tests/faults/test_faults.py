"""A fault at every change to a file, for one tiny run of each kind; ``faults.py`` says what is exhaustive."""

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
    """Search over the faults of one kind of run in this child process; exit with 1 if one does harm."""
    prepare(folder / "cache")
    register_tasks(dict.__setitem__)
    torch.set_num_threads(1)
    if kind == "grow":
        writer_module.LINES_BYTES = 500  # type: ignore[misc]  # every checkpoint converts rows to Parquet
    try:
        found = explore(COMMANDS[kind], folder / "search")
        sys.stderr.write(f"{kind}: {found}\n")
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_fault_at_any_change_to_a_file_loses_nothing(kind: str, tmp_path: Path) -> None:
    child = forked(search, kind, tmp_path)
    child.join()
    assert child.exitcode == 0
