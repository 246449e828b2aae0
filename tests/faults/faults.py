"""Search over all faults of a command: every change to a file fails, or is the last one of the process.

``explore`` runs a command once. Before change number n of the run

- the folder is copied as it is: the process dies there;
- the folder is copied as a power failure would leave it: what was not flushed is undone;
- a child process continues in a copy of the folder with a full disk;
- a child process continues in a copy of the folder, and change n fails for want of permission.

A child must end with sentences on standard error, and without a traceback. If it reports success, its files
must be those of the undisturbed run; otherwise its folder is resumed or read like that of a dead process. If
several faults leave equal folders, only one of these folders is resumed or read.
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

from esper.leyline.errors import EsperError
from tests.faults.disk import Disk, Fault, copy_of


class Command(NamedTuple):
    """Command under test; all functions work in the current folder."""

    prepare: Callable[[], object]
    """Creates the files that exist before the command starts."""
    work: Callable[[], object]
    """Runs the command; raises ``EsperError`` or ``SystemExit`` unless it succeeds."""
    recover: Callable[[], object]
    """Resumes or repeats the command after a fault, or reads what it has left."""
    check: Callable[[Path], object]
    """Asserts that the files after success, or after ``recover``, equal those of an undisturbed run."""


class Explored(NamedTuple):
    """Numbers of one search."""

    changes: int
    """Changes to files in an undisturbed run."""
    folders: int
    """Different folders that faults left."""
    successes: int
    """Children that reported success in spite of their fault."""


def explore(command: Command, folder: Path) -> Explored:
    """Run ``command`` with every fault and check each end; ``folder`` is a new folder for all copies.

    Raises:
        AssertionError: A fault has lost or damaged something.
    """
    whole, states, warm = (folder / name for name in ("whole", "states", "warm"))
    for path in (folder, whole, states, warm):
        path.mkdir()
    for path in (warm, whole):
        os.chdir(path)
        command.prepare()
        if path == warm:
            command.work()  # Fill caches and import modules, which later runs then do not do again.
    place: Path | None = None  # folder of this process if it is a child

    def before_change() -> None:
        nonlocal place
        if place is not None:
            return
        _keep(whole, states)
        disk.durable(states / "new")
        _name(states / "new", states)
        for number, fault in enumerate(get_args(Fault)):
            child = os.fork()
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


def _outcome(work: Callable[[], object]) -> list[object]:
    """Return exit code and standard error of the command."""
    said = sys.stderr = StringIO()
    sys.stdout = StringIO()
    code: object = 0
    try:
        work()
    except SystemExit as end:
        code = end.code
    except EsperError as error:
        code = str(error)
    except BaseException as error:  # Every other class would be a traceback.
        code = f"Traceback: {error!r}"
    finally:
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    return [code, said.getvalue()]


def _check_end(path: Path, command: Command, whole: Path, states: Path) -> bool:
    """Check the end of a child process and return whether it reported success."""
    code, said = json.loads(path.read_text())
    place = path.with_suffix("")
    where = f"{place.name}: {code} {said}"
    assert "Traceback" not in where, where
    assert "not foreseen" not in where, where
    assert all(line.startswith("esper: ") for line in said.splitlines()), where
    os.chdir(place)
    # Without permission to remove a file, a partial file may stay; the next writer removes it.
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
    """Rename the folder ``new`` to a digest of its files; partial files count by their number only."""
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
