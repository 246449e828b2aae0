"""Fault injection at every change that a command makes to a file: crash, power failure, full disk, missing
permission.

``explore`` runs a command once and simulates four faults before every change to a file. To simulate a crash,
the run's folder is copied as it is. To simulate a power failure, the folder is copied without the changes
that were not flushed to disk. To simulate a full disk, a child process continues the command in a copy of the
folder, and all changes that need space fail. To simulate a missing permission, a child process continues in a
copy of the folder, and only the next change fails.

A child process must print one-sentence errors and no traceback. If the child process reports success, its
files must equal those of the undisturbed run; if not, its folder is resumed or read like that of a killed
process. If several faults leave equal folders, only one of these folders is resumed or read.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import NamedTuple, get_args
from unittest import mock

import filelock

from esper.leyline.errors import EsperError
from tests.faults.disk import Disk, Fault, copy_of


class Command(NamedTuple):
    """Command under test, as functions that work in the current folder."""

    prepare: Callable[[], object]
    """Create the files that exist before the command starts."""
    work: Callable[[], object]
    """Run the command; raises ``EsperError`` or ``SystemExit`` unless it succeeds."""
    recover: Callable[[], object]
    """Resume or repeat the command after a fault, or read the files that the fault has left."""
    check: Callable[[Path], object]
    """Assert that the files after success, or after ``recover``, equal those of an undisturbed run."""


class Explored(NamedTuple):
    """Statistics of the fault injection into one command."""

    changes: int
    """Number of changes to files in an undisturbed run."""
    folders: int
    """Number of different folders that killed processes, power failures and failed children left."""
    successes: int
    """Number of child processes that reported success in spite of their fault."""


def explore(command: Command, folder: Path) -> Explored:
    """Run ``command`` with every fault and check the result of each; all copies are made in a new ``folder``.

    Raises:
        AssertionError: A fault has lost or damaged data, or its error message is not one sentence.
    """
    whole, states, warm = (folder / name for name in ("whole", "states", "warm"))
    for path in (folder, whole, states, warm):
        path.mkdir()
    for path in (warm, whole):
        os.chdir(path)
        command.prepare()
        if path == warm:
            command.work()  # Imports and caches must not differ between the later runs.
    place: Path | None = None  # Folder of this process; None in the parent process.

    def before_change() -> None:
        nonlocal place
        if place is not None:
            return
        _keep(whole, states)
        disk.durable(states / "new")
        _name(states / "new", states)
        for number, fault in enumerate(get_args(Fault)):
            child = _fork()
            if child == 0:
                place = copy_of(whole, folder / f"{disk.changes}-{number}")
                disk.move_to(place)
                disk.fault = fault
                return
            assert os.waitpid(child, 0)[1] == 0

    disk = Disk(before_change)
    with disk.watched():
        end = _outcome(command.work)
    if place is not None:
        (folder / f"{place.name}.json").write_text(json.dumps(end))
        os._exit(0)
    assert end == [0, ""], end
    disk.durable(states / "new")
    _name(states / "new", states)
    successes = [_check_end(path, command, whole, states) for path in sorted(folder.glob("*-*.json"))]
    folders = sorted(states.iterdir())
    for state in folders:
        os.chdir(state)
        command.recover()
        command.check(whole)
    return Explored(disk.changes, len(folders), sum(successes))


def _fork() -> int:
    """Fork a process that also holds the locks of this process, which filelock takes from other children."""
    number = os.getpid()
    with mock.patch.object(os, "getpid", return_value=number):
        child = os.fork()
    if child == 0:
        os.getpid = lambda: number
        filelock._api._resume_parent_after_fork()
    return child


def _outcome(work: Callable[[], object]) -> list[object]:
    """Return exit code and standard error of the command ``work``."""
    said = sys.stderr = StringIO()
    sys.stdout = StringIO()
    code: object = 0
    try:
        work()
    except SystemExit as end:
        code = end.code
    except EsperError as error:
        code = str(error)
    except BaseException as error:  # An error of another class would end the command with a traceback.
        code = f"Traceback: {error!r}"
    finally:
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    return [code, said.getvalue()]


def _check_end(path: Path, command: Command, whole: Path, states: Path) -> bool:
    """Check exit code, messages and files of a child process; return whether the child reported success."""
    code, said = json.loads(path.read_text())
    place = path.with_suffix("")
    where = f"{place.name}: {code} {said}"
    assert "Traceback" not in where, where
    assert "not foreseen" not in where, where
    assert all(line.startswith("esper: ") for line in said.splitlines()), where
    os.chdir(place)
    # A partial file may stay if the permission to remove it was missing; the next writer removes the file.
    assert place.name.endswith("-1") or not [*place.rglob(".esper-*")], where
    if code == 0:
        try:
            command.check(whole)
        except Exception as error:
            raise AssertionError(where) from error
        return True
    _keep(place, states)
    return False


def _keep(folder: Path, states: Path) -> None:
    _name(copy_of(folder, states / "new"), states)


def _name(new: Path, states: Path) -> None:
    """Rename the folder ``new`` to a digest of its files, without names and contents of partial files."""
    digest = hashlib.sha256()
    for path in sorted(new.rglob("*")):
        name = str(path.relative_to(new))
        is_partial = ".esper-" in name
        digest.update(b".esper" if is_partial else name.encode())
        digest.update(b"" if is_partial or path.is_dir() else hashlib.sha256(path.read_bytes()).digest())
    target = states / digest.hexdigest()
    if target.exists():
        shutil.rmtree(new)
    else:
        new.rename(target)
