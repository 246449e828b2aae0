import errno
import itertools
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from esper.files.append import write_all
from esper.files.atomic_write import SaveError, partial_of
from esper.files.row_files import RowMark
from esper.karn.run import read_rows
from esper.leyline.errors import EsperError, RunDirectoryError
from esper.leyline.rows import EpochRow, RunRow
from esper.nissa import writer as writer_module
from esper.nissa.writer import RunWriter
from esper.run.arm import run_arm
from esper.run.run_config import RunConfig
from esper.tolaria.tasks import TASKS
from tests.karn import fake_run
from tests.tolaria.building import tiny_task


@pytest.mark.parametrize("below", ["", "runs/a/b"])
def test_run_writer_creates_its_directory_and_refuses_a_directory_that_contains_telemetry(tmp_path, below):
    RunWriter(tmp_path / below).close()

    assert (tmp_path / below / "telemetry").is_dir()
    with pytest.raises(RunDirectoryError, match="already holds telemetry; choose another one, or move it"):
        RunWriter(tmp_path / below)


def test_run_writer_refuses_a_non_empty_directory_and_leaves_it_unchanged(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")

    with pytest.raises(RunDirectoryError, match=r"already holds notes\.txt"):
        RunWriter(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]


def test_exactly_one_of_eight_simultaneous_writers_gets_the_run_directory(tmp_path):
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
def test_run_writer_refuses_a_path_that_is_not_a_writable_directory(tmp_path, place):
    (tmp_path / "file").write_text("in the way")
    # Not even root can create a directory below a symlink to itself.
    (tmp_path / "loop").symlink_to(tmp_path / "loop")

    with pytest.raises(RunDirectoryError, match=r"cannot be written: [A-Z][\w ]+; choose"):
        RunWriter(tmp_path / place)


def full_disk(file: int, content: bytearray) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write_epochs(writer, first, last):
    for epoch in range(first, last):
        writer.emit(fake_run.epoch_row(epoch))
        writer.flush()


def test_run_on_a_full_disk_prints_one_message_and_ends_with_an_error(tmp_path, monkeypatch, capsys):
    failed = f"'{tmp_path / 'telemetry' / 'rows-00000.jsonl'}' cannot be written: No space left on device"
    writer = RunWriter(tmp_path)
    monkeypatch.setattr(os, "write", full_disk)
    write_epochs(writer, 0, 4)
    with pytest.raises(SaveError, match=r"^the run is over, but not complete") as error, writer:
        pass

    assert failed in str(error.value)
    said = f"esper: {failed}; what was saved before is intact, and the run continues\n"
    assert capsys.readouterr().err == said


def test_rows_that_did_not_fit_on_a_full_disk_are_written_when_there_is_room_again(tmp_path, monkeypatch):
    with RunWriter(tmp_path) as writer:
        write_epochs(writer, 0, 1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full_disk)
            write_epochs(writer, 1, 3)
        write_epochs(writer, 3, 4)

    assert [row.epoch for row in read_rows(tmp_path, EpochRow)] == [0, 1, 2, 3]


def test_rows_of_an_iteration_that_did_not_fit_are_written_with_the_next_iteration(tmp_path, monkeypatch):
    with RunWriter(tmp_path) as writer:
        for number in range(4):
            with monkeypatch.context() as patch:
                if number == 2:
                    patch.setattr(os, "replace", full_disk)
                with writer.iteration(number):
                    writer.emit(fake_run.epoch_row(number))

    assert [row.epoch for row in read_rows(tmp_path, EpochRow)] == [0, 1, 2, 3]
    assert sorted(path.name for path in (tmp_path / "telemetry").glob("rows-*")) == [
        "rows-00000.jsonl", "rows-00001.jsonl", "rows-00002-00002", "rows-00003.jsonl",
    ]  # fmt: skip


def test_rows_and_further_rows_are_dropped_when_more_than_the_limit_wait_for_a_full_disk(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(writer_module, "WAITING_BYTES", 500)
    writer = RunWriter(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full_disk)
        write_epochs(writer, 0, 7)
    write_epochs(writer, 7, 8)
    with pytest.raises(SaveError, match="not complete on disk"), writer:
        pass

    assert read_rows(tmp_path, EpochRow) == []


def test_run_whose_directory_was_deleted_ends_with_an_error(tmp_path):
    writer = RunWriter(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    write_epochs(writer, 0, 1)
    with pytest.raises(SaveError, match="cannot be written: No such file or directory"), writer:
        pass

    assert not (tmp_path / "run").exists()


def test_run_whose_directory_was_replaced_leaves_the_new_directory_alone(tmp_path):
    writer = RunWriter(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    RunWriter(tmp_path / "run").close()
    write_epochs(writer, 0, 1)
    with pytest.raises(SaveError, match="its folder was replaced"), writer:
        pass

    assert read_rows(tmp_path / "run", EpochRow) == []


@pytest.mark.parametrize("name", ["telemetry", "telemetry/new", "telemetry/new/deep"])
def test_run_writer_refuses_a_directory_inside_the_telemetry_of_a_run(tmp_path, name):
    RunWriter(tmp_path).close()
    with pytest.raises(EsperError, match=r"is inside '.*telemetry', which only its writer may change"):
        RunWriter(tmp_path / name)


def test_resumed_run_removes_the_partial_files_of_its_dead_writer(tmp_path):
    with RunWriter(tmp_path) as writer, writer.iteration(0):
        writer.emit(fake_run.run_row())
    for folder in (tmp_path, tmp_path / "telemetry", tmp_path / "checkpoints" / "iteration-00001"):
        folder.mkdir(parents=True, exist_ok=True)
        partial_of(folder / "any").write_bytes(b"half")
    RunWriter(tmp_path, resume_from=RowMark(0, 0.0)).close()

    assert not list(tmp_path.rglob(".esper-*"))


def test_run_whose_telemetry_cannot_be_written_to_a_full_disk_continues(tmp_path, monkeypatch, capsys):
    """Check that three episodes finish and save their networks although epoch rows cannot be written."""
    monkeypatch.setenv("ESPER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(TASKS, "tiny", tiny_task())
    writes = itertools.count()

    def fill_the_disk(file: int, content: bytearray) -> None:
        # The first write, which is that of the run row, succeeds.
        if next(writes):
            full_disk(file, content)
        write_all(file, content)

    monkeypatch.setattr(writer_module, "write_all", fill_the_disk)
    config = RunConfig(episodes=3, steps=2).model_copy(update={"task": "tiny"})
    with pytest.raises(SaveError, match=r"rows-00000\.jsonl' cannot be written: No space left on device"):
        run_arm(config, "heuristic", tmp_path / "run")

    assert capsys.readouterr().err.count("cannot be written") == 1
    assert len(list((tmp_path / "run" / "model").iterdir())) == 3
    assert len(read_rows(tmp_path / "run", RunRow)) == 1
