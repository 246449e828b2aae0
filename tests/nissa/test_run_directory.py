import errno
import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from esper.config import RunConfig
from esper.karn.query import read_rows
from esper.leyline.errors import RunDirectoryError
from esper.nissa import writer as writer_module
from esper.nissa.writer import RunWriter
from esper.runner import run_arm
from esper.tolaria.tasks import TASKS
from tests.karn import fake_run
from tests.tolaria.building import tiny_task


def make_rows_end_on_a_full_disk(run):
    path = run / "telemetry" / "rows-00000.jsonl"
    path.symlink_to("/dev/full")
    return path


def test_a_directory_and_its_parents_are_made(tmp_path):
    RunWriter(tmp_path / "runs" / "a" / "b").close()

    assert (tmp_path / "runs" / "a" / "b" / "telemetry").is_dir()


def test_an_empty_directory_is_taken(tmp_path):
    RunWriter(tmp_path).close()

    assert (tmp_path / "telemetry").is_dir()


def test_a_directory_that_holds_something_is_refused_and_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")

    with pytest.raises(RunDirectoryError, match=r"already holds notes\.txt; choose another one, or move it"):
        RunWriter(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]


def test_a_run_is_never_written_over(tmp_path):
    RunWriter(tmp_path / "run").close()

    with pytest.raises(RunDirectoryError, match="already holds telemetry"):
        RunWriter(tmp_path / "run")


def test_of_runs_that_start_at_once_exactly_one_gets_the_directory(tmp_path):
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


@pytest.mark.parametrize("below", ["", "run", "runs/a"])
def test_a_file_in_the_way_is_a_sentence(tmp_path, below):
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(RunDirectoryError, match=r"cannot be written: (File exists|Not a directory); choose"):
        RunWriter(tmp_path / "file" / below)


def test_a_place_where_nothing_may_be_made_is_a_sentence(tmp_path):
    # Not even root makes directories in a symbolic link's dangling loop.
    (tmp_path / "loop").symlink_to(tmp_path / "loop")

    with pytest.raises(RunDirectoryError, match="cannot be written: "):
        RunWriter(tmp_path / "loop" / "run")


def test_a_full_disk_ends_telemetry_with_one_sentence_and_never_raises(tmp_path):
    warnings: list[str] = []
    writer = RunWriter(tmp_path, warn=warnings.append)
    path = make_rows_end_on_a_full_disk(tmp_path)
    assert not writer.failed

    for epoch in range(4):
        writer.emit(fake_run.epoch_row(epoch))
        writer.flush()
    writer.close()

    assert writer.failed
    assert warnings == [
        f"telemetry stopped: cannot write {path} (No space left on device);"
        " the run goes on, its further rows are lost"
    ]


def test_a_full_disk_ends_the_telemetry_of_a_run_and_not_the_run(tmp_path, monkeypatch, capsys):
    """The first row of an epoch finds no room; three episodes go on to their end, and are saved."""
    monkeypatch.setenv("ESPER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(TASKS, "tiny", tiny_task())
    writes = itertools.count()

    def full_disk(file: int, content: bytearray) -> None:
        if next(writes):  # the run's own row is written
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.write(file, content)

    monkeypatch.setattr(writer_module, "write_all", full_disk)
    config = RunConfig(episodes=3, steps=2).model_copy(update={"task": "tiny"})
    run_arm(config, "heuristic", tmp_path / "run")

    assert capsys.readouterr().err.count("telemetry stopped: cannot write ") == 1
    assert len(list((tmp_path / "run" / "model").iterdir())) == 3
    assert len(read_rows(tmp_path / "run", "run")) == 1


def test_without_somebody_to_warn_the_sentence_goes_to_stderr(tmp_path, capsys):
    with RunWriter(tmp_path) as writer:
        make_rows_end_on_a_full_disk(tmp_path)
        writer.emit(fake_run.epoch_row(1))

    assert capsys.readouterr().err.startswith("esper: telemetry stopped: cannot write ")
