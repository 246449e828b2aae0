"""Telemetry rows of a training are written in whole iterations; rows of the unfinished iteration are in a
journal."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from esper.files.row_files import RowMark
from esper.karn.run import Run, read_rows
from esper.leyline.errors import EsperError, RunDirectoryError
from esper.leyline.rows import EpochRow, ResourceRow, RunRow, UpdateRow
from esper.nissa import iteration_journal
from esper.nissa import writer as writer_module
from esper.nissa.iteration_journal import IterationJournal
from esper.nissa.writer import RunWriter
from tests.integration.training import full_disk
from tests.karn import fake_run

Place = tuple[int, int, int]


def places(run: Path) -> list[Place]:
    """Return environment, episode and epoch of all epoch rows."""
    return [(row.env, row.episode, row.epoch) for row in read_rows(run, EpochRow)]


def write_iteration(writer: RunWriter, number: int) -> None:
    """Write an iteration with one epoch row of one environment and one update row."""
    with writer.iteration(number):
        writer.emit(fake_run.epoch_row(1, episode=number - 1))
        writer.emit(fake_run.update_row(number))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def killed(out: Path) -> Iterator[IterationJournal]:
    """Yield the journal of the unfinished iteration 2 of a run that was closed after iteration 1."""
    with RunWriter(out) as writer:
        write_iteration(writer, 1)
    second = IterationJournal(out, "standard")
    yield second
    second.close()


# --- readers ----------------------------------------------------------------------------------------


def test_readers_of_a_killed_run_find_the_journal_rows_after_all_other_rows(
    out: Path, killed: IterationJournal
) -> None:
    killed.take(2, 0, [fake_run.epoch_row(1, episode=1), fake_run.epoch_row(1, episode=1, env=1)])
    killed.take(2, 0, [fake_run.epoch_row(2, episode=1)])
    killed.take(2, 4, [fake_run.epoch_row(1, episode=1, env=4)])
    assert places(out) == [(0, 0, 1), (0, 1, 1), (1, 1, 1), (0, 1, 2), (4, 1, 1)]


def test_journal_rows_have_the_time_since_run_start_and_are_omitted_beyond_the_level_of_detail(
    out: Path, killed: IterationJournal
) -> None:
    for detail in ("summary", "standard"):
        kept = IterationJournal(out, detail, clock=lambda: 107.25)
        kept.began = 100.0
        kept.take(2, 0, [fake_run.epoch_row(1)])
    assert [row.t for row in read_rows(out, EpochRow)][1:] == [7.25]


def test_only_complete_iterations_are_read_while_a_run_is_written(out: Path) -> None:
    """The reader, an open ``Run``, exists before the first iteration is written."""
    with RunWriter(out) as writer:
        run = Run(out)
        kept = IterationJournal(out, "standard")
        kept.take(1, 0, [fake_run.epoch_row(1)])
        assert run.rows(EpochRow) == []
        write_iteration(writer, 1)
        assert len(run.rows(EpochRow)) == 1
        kept.take(2, 0, [fake_run.epoch_row(1)])
        assert len(run.rows(EpochRow)) == 1
    for epoch in (2, 3):
        assert len(run.rows(EpochRow)) == epoch
        # A worker process that outlives the writer process appends a row to the journal.
        kept.take(2, 0, [fake_run.epoch_row(epoch)])


def test_incomplete_last_line_of_a_journal_is_ignored_and_a_damaged_line_is_reported(
    out: Path, killed: IterationJournal
) -> None:
    killed.take(2, 0, [fake_run.epoch_row(1, episode=1), fake_run.epoch_row(2, episode=1)])
    path = out / "telemetry" / "unfinished-00002" / "env-0000.jsonl"
    os.truncate(path, path.stat().st_size - 9)
    killed.take(2, 1, [fake_run.epoch_row(1, episode=1, env=1)])
    assert places(out) == [(0, 0, 1), (0, 1, 1), (1, 1, 1)]
    path.write_bytes(b'{"table":"epoch","t":"soon"}\n')
    with pytest.raises(EsperError, match=r"env-0000\.jsonl, line 1, is not a row of table 'epoch'"):
        read_rows(out, EpochRow)


# --- atomic iterations ------------------------------------------------------------------------------


def interrupt(*args: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("emitted", [0, 1, 2, 3])
def test_training_interrupted_before_its_iteration_is_complete_has_each_epoch_row_once(
    out: Path, emitted: int
) -> None:
    """Interrupt a writer that then closes normally; the journal has every epoch row of the iteration."""
    epochs = [fake_run.epoch_row(epoch, episode=1) for epoch in (1, 2)]
    with RunWriter(out) as writer:
        write_iteration(writer, 1)
        IterationJournal(out, "standard").take(2, 0, epochs)
        with suppress(KeyboardInterrupt), writer.iteration(2):
            for row in [*epochs, fake_run.update_row(2)][:emitted]:
                writer.emit(row)
            interrupt()
    assert places(out) == [(0, 0, 1), (0, 1, 1), (0, 1, 2)]
    assert len(read_rows(out, UpdateRow)) == 1
    assert len(read_rows(out, ResourceRow)) == 1, "of the end"


def test_iteration_interrupted_before_its_file_is_renamed_is_written_when_the_writer_closes(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    epochs = [fake_run.epoch_row(epoch, episode=1) for epoch in (1, 2)]
    with RunWriter(out) as writer:
        write_iteration(writer, 1)
        IterationJournal(out, "standard").take(2, 0, epochs)
        with monkeypatch.context() as patched, suppress(KeyboardInterrupt), writer.iteration(2):
            for row in [*epochs, fake_run.update_row(2)]:
                writer.emit(row)
            patched.setattr(os, "replace", interrupt)
    assert places(out) == [(0, 0, 1), (0, 1, 1), (0, 1, 2)]
    assert len(read_rows(out, UpdateRow)) == 2


def test_iteration_file_is_renamed_after_fsync_and_then_the_journal_is_removed(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If an iteration file were renamed before fsync, a power failure could leave an empty file."""
    done: list[tuple[str, int]] = []
    fsync, replace = os.fsync, os.replace
    with RunWriter(out) as writer:
        IterationJournal(out, "standard").take(1, 0, [fake_run.epoch_row(1)])
        monkeypatch.setattr(os, "fsync", lambda f: (done.append(("synced", os.fstat(f).st_ino)), fsync(f)))
        monkeypatch.setattr(
            os, "replace", lambda a, b: (done.append(("named", os.stat(a).st_ino)), replace(a, b))
        )
        write_iteration(writer, 1)
        inode = (out / "telemetry" / "rows-00001.jsonl").stat().st_ino
        folder = (out / "telemetry").stat().st_ino
    named = done.index(("named", inode))
    assert done[named - 1 : named + 2] == [("synced", inode), ("named", inode), ("synced", folder)]
    assert not (out / "telemetry" / "unfinished-00001").exists()


def test_finished_training_leaves_no_journal_and_no_resource_row_after_its_last_iteration(out: Path) -> None:
    now = 0.0
    with RunWriter(out, clock=lambda: now) as writer:
        write_iteration(writer, 1)
        with writer.iteration(2, is_last=True):
            writer.emit(fake_run.update_row(2))
        now = 60.0  # A last resource row would be due, but no row may follow the last iteration.
    assert list((out / "telemetry").glob("unfinished-*")) == []
    assert [row.t for row in read_rows(out, ResourceRow)] == [0.0]


# --- resuming ---------------------------------------------------------------------------------------


def test_resumed_run_removes_rows_after_its_checkpoint_and_continues_its_run_time(out: Path) -> None:
    """Expect a run time of two seconds until the checkpoint and of three after the resume; the pause does not
    count."""
    now = 100.0
    with RunWriter(out, clock=lambda: now) as writer:
        with writer.iteration(0):
            writer.emit(fake_run.run_row(iterations=9))
        now = 102.0
        write_iteration(writer, 1)
        with writer.checkpoint() as mark:
            assert mark == RowMark(1, 2.0)
        now = 150.0
        for number in (2, 3):
            write_iteration(writer, number)
        IterationJournal(out, "standard").take(4, 0, [fake_run.epoch_row(1, episode=3)])
    now = 500.0
    with RunWriter(out, resume_from=mark, clock=lambda: now) as writer:
        assert places(out) == [(0, 0, 1)]
        now = 501.0
        write_iteration(writer, 2)

    assert [(row.iteration, row.t) for row in read_rows(out, UpdateRow)] == [(1, 2.0), (2, 3.0)]
    assert len(read_rows(out, RunRow)) == 1


def test_resume_removes_the_newest_iteration_first_so_that_a_kill_leaves_no_gap(
    out: Path, killed: IterationJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed.take(2, 0, [fake_run.epoch_row(1, episode=1)])
    remove, removed = writer_module.remove, []

    def remove_one(path: Path) -> None:
        if removed:
            full_disk()
        removed.append(path.name)
        remove(path)

    with RunWriter(out, resume_from=RowMark(1, 0.0)) as writer:
        for number in (2, 3):
            write_iteration(writer, number)
    monkeypatch.setattr(writer_module, "remove", remove_one)
    for left in ([1, 2, 3], [1, 2], [1]):
        removed.clear()
        with pytest.raises(RunDirectoryError):
            RunWriter(out, resume_from=RowMark(0, 0.0))
        assert [row.iteration for row in read_rows(out, UpdateRow)] == left


def test_resumed_run_without_a_run_row_starts_over(out: Path) -> None:
    with RunWriter(out) as writer, pytest.raises(KeyboardInterrupt), writer.iteration(0):
        raise KeyboardInterrupt
    with RunWriter(out, resume_from=RowMark(0, 0.0)) as writer, writer.iteration(0):
        writer.emit(fake_run.run_row(iterations=1))
    assert len(read_rows(out, RunRow)) == 1


# --- full disk --------------------------------------------------------------------------------------


def test_journal_ignores_rows_after_a_failed_write_until_the_next_shard_of_environments(
    out: Path, killed: IterationJournal, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Let both writing and closing the journal file fail with the error of a full disk."""
    with monkeypatch.context() as patch:
        patch.setattr(iteration_journal, "write_all", full_disk)
        patch.setattr(os, "close", full_disk)
        killed.take(2, 0, [fake_run.epoch_row(1, episode=1)])
    killed.take(2, 0, [fake_run.epoch_row(2, episode=1)])
    killed.take(2, 2, [fake_run.epoch_row(1, episode=1, env=2)])
    assert places(out) == [(0, 0, 1), (2, 1, 1)]
    assert capfd.readouterr().err == ""


def test_rows_of_an_iteration_that_cannot_be_written_are_written_with_the_next_iteration(
    out: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def take(number: int) -> None:
        kept.take(number, 0, [fake_run.epoch_row(1, episode=number - 1)])

    with RunWriter(out) as writer:
        kept = IterationJournal(out, "standard")
        write_iteration(writer, 1)
        take(2)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full_disk)
            write_iteration(writer, 2)
            assert (out / "telemetry" / "unfinished-00002").is_dir(), "the journal is kept"
        for number in (3, 4):
            take(number)
            write_iteration(writer, number)
        with writer.checkpoint() as mark:
            assert mark.iteration == 4
    assert capfd.readouterr().err.count("the run continues") == 1
    assert [n for n in (2, 3, 4) if (out / "telemetry" / f"unfinished-0000{n}").exists()] == []

    with RunWriter(out, resume_from=mark) as writer:
        write_iteration(writer, 5)
    assert [row.iteration for row in read_rows(out, UpdateRow)] == [1, 2, 3, 4, 5]
    assert (out / "telemetry" / "rows-00002-00002").is_dir(), "its rows are in the file of iteration 3"


def test_second_writer_of_a_run_is_refused_while_the_first_writer_is_open(out: Path) -> None:
    begin: dict[str, Any] = {"resume_from": RowMark(0, 0.0)}
    with RunWriter(out) as writer:
        write_iteration(writer, 1)
        with pytest.raises(RunDirectoryError, match="is being written by another process; let it finish"):
            RunWriter(out, **begin)
        assert places(out) == [(0, 0, 1)]
    RunWriter(out, **begin).close()
    assert places(out) == []
