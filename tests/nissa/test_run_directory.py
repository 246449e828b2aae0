import errno
import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from esper.karn.run import read_rows
from esper.leyline.errors import RunDirectoryError
from esper.leyline.rows import RunRow
from esper.nissa import writer as writer_module
from esper.nissa.writer import RunWriter
from esper.run.arm import run_arm
from esper.run.run_config import RunConfig
from esper.tolaria.tasks import TASKS
from tests.karn import fake_run
from tests.tolaria.building import tiny_task


def make_rows_end_on_a_full_disk(run):
    path = run / "telemetry" / "rows-00000.jsonl"
    path.symlink_to("/dev/full")
    return path


@pytest.mark.parametrize("below", ["", "runs/a/b"])
def test_empty_directory_is_used_or_created_and_never_overwritten(tmp_path, below):
    RunWriter(tmp_path / below).close()

    assert (tmp_path / below / "telemetry").is_dir()
    with pytest.raises(RunDirectoryError, match="already holds telemetry; choose another one, or move it"):
        RunWriter(tmp_path / below)


def test_non_empty_directory_is_refused_and_left_unchanged(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")

    with pytest.raises(RunDirectoryError, match=r"already holds notes\.txt"):
        RunWriter(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]


def test_exactly_one_of_two_simultaneous_runs_gets_the_directory(tmp_path):
    start = Barrier(8)

    def claim(_):
        start.wait()
        try:
            RunWriter(tmp_path / "run").close()
        except RunDirectoryError:
            return 0
        return 1

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(claim, range(8))) == 1


@pytest.mark.parametrize("place", ["file", "file/run", "file/runs/a", "loop/run"])
def test_path_that_is_not_a_writable_directory_is_refused(tmp_path, place):
    (tmp_path / "file").write_text("in the way")
    # Not even root can create a directory below a symlink to itself.
    (tmp_path / "loop").symlink_to(tmp_path / "loop")

    with pytest.raises(RunDirectoryError, match=r"cannot be written: [A-Z][\w ]+; choose"):
        RunWriter(tmp_path / place)


def test_full_disk_ends_telemetry_with_one_message_and_never_raises(tmp_path, capsys):
    writer = RunWriter(tmp_path)
    path = make_rows_end_on_a_full_disk(tmp_path)
    assert not writer.failed

    for epoch in range(4):
        writer.emit(fake_run.epoch_row(epoch))
        writer.flush()
    writer.close()

    expected = f"telemetry stopped: cannot write {path} (No space left on device);"
    expected += " the run goes on, its further rows are lost"
    assert writer.failed
    assert capsys.readouterr().err == f"esper: {expected}\n"


def test_full_disk_ends_the_telemetry_of_a_run_and_not_the_run(tmp_path, monkeypatch, capsys):
    """If epoch rows cannot be written, three episodes still finish and their networks are saved."""
    monkeypatch.setenv("ESPER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(TASKS, "tiny", tiny_task())
    writes = itertools.count()

    def full_disk(file: int, content: bytearray) -> None:
        # The first write, of the run row, succeeds.
        if next(writes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.write(file, content)

    monkeypatch.setattr(writer_module, "write_all", full_disk)
    config = RunConfig(episodes=3, steps=2).model_copy(update={"task": "tiny"})
    run_arm(config, "heuristic", tmp_path / "run")

    assert capsys.readouterr().err.count("telemetry stopped: cannot write ") == 1
    assert len(list((tmp_path / "run" / "model").iterdir())) == 3
    assert len(read_rows(tmp_path / "run", RunRow)) == 1
