"""The rows of an iteration in progress: what a killed training leaves of it, and when readers take it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from esper.karn.query import read_rows
from esper.karn.run import Run, open_run
from esper.leyline.errors import EsperError, RunDirectoryError
from esper.leyline.events import EpochRow, UpdateRow
from esper.nissa import journal
from esper.nissa.encoding import RowError
from esper.nissa.journal import IterationJournal
from esper.nissa.part import TablePart
from esper.nissa.writer import RunWriter
from tests.integration.training import full_disk
from tests.karn import fake_run


def lived(run: Path) -> list[tuple[int, int, int]]:
    return [(row.env, row.episode, row.epoch) for row in read_rows(run, EpochRow)]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"


def write_iteration(writer: RunWriter, number: int) -> None:
    """One environment, one epoch, and the iteration's own row."""
    with writer.adding_iteration(number):
        writer.emit(fake_run.epoch_row(1, episode=number - 1))
        writer.emit(fake_run.update_row(number))


@pytest.fixture
def killed(out: Path) -> Iterator[IterationJournal]:
    """The journal of a run of one iteration whose writer is gone; what it takes belongs to the second."""
    with RunWriter(out, resumable=True) as writer:
        write_iteration(writer, 1)
        second = IterationJournal(out, "standard", writer.began)
        second.take(2, 0, [])  # so that the writer finds one when it closes
    yield second
    second.close()


def test_readers_of_a_run_that_nobody_writes_find_its_rows_behind_the_tables(
    out: Path, killed: IterationJournal
) -> None:
    killed.take(2, 0, [fake_run.epoch_row(1, episode=1), fake_run.epoch_row(1, episode=1, env=1)])
    killed.take(2, 0, [fake_run.epoch_row(2, episode=1)])
    killed.take(2, 4, [fake_run.epoch_row(1, episode=1, env=4)])
    assert lived(out) == [(0, 0, 1), (0, 1, 1), (1, 1, 1), (0, 1, 2), (4, 1, 1)]


def test_rows_have_the_time_of_the_run(out: Path) -> None:
    RunWriter(out, resumable=True).close()
    kept = IterationJournal(out, "standard", began=100.0, clock=lambda: 107.25)
    kept.take(1, 0, [fake_run.epoch_row(1)])
    assert [row.t for row in read_rows(out, EpochRow)] == [7.25]


def test_while_a_run_is_written_only_complete_iterations_count(out: Path) -> None:
    with RunWriter(out, resumable=True) as writer:
        kept = IterationJournal(out, "standard", writer.began)
        kept.take(1, 0, [fake_run.epoch_row(1)])
        assert lived(out) == []
        write_iteration(writer, 1)
        assert lived(out) == [(0, 0, 1)]


def test_a_reader_that_stays_sees_when_the_writer_is_gone(out: Path) -> None:
    writer = RunWriter(out, resumable=True)
    kept = IterationJournal(out, "standard", writer.began)
    kept.take(1, 0, [fake_run.epoch_row(1)])
    run = Run(out)
    assert run.rows(EpochRow) == []
    writer.close()
    assert len(run.rows(EpochRow)) == 1
    assert len(run.sql("SELECT * FROM epoch").fetchall()) == 1


def test_a_reader_that_stays_sees_what_an_outliving_process_adds(out: Path, killed: IterationJournal) -> None:
    run = Run(out)
    for epoch in (1, 2):
        killed.take(2, 0, [fake_run.epoch_row(epoch, episode=1)])
        assert len(run.rows(EpochRow)) == 1 + epoch


def test_a_torn_line_is_not_there(out: Path, killed: IterationJournal) -> None:
    killed.take(2, 0, [fake_run.epoch_row(1, episode=1), fake_run.epoch_row(2, episode=1)])
    [path] = (out / "telemetry" / "journals").glob("*.rows")
    os.truncate(path, path.stat().st_size - 9)
    killed.take(2, 1, [fake_run.epoch_row(1, episode=1, env=1)])
    assert lived(out) == [(0, 0, 1), (0, 1, 1), (1, 1, 1)]


def test_what_a_level_of_detail_leaves_out_is_not_kept(out: Path) -> None:
    RunWriter(out, resumable=True).close()
    kept = IterationJournal(out, "summary", 0.0)
    kept.take(1, 0, [fake_run.epoch_row(1)])
    assert lived(out) == []


def test_a_row_that_cannot_be_told_truthfully_is_refused(out: Path, killed: IterationJournal) -> None:
    row = fake_run.epoch_row(1)
    row.val_loss = float("nan")
    with pytest.raises(RowError, match="column 'val_loss' of table 'epoch' is nan"):
        killed.take(2, 0, [row])


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("written.json", b'{"iteration": 0}', r"written.json' is damaged: "),
        (
            "iteration-00002-env-0000.rows",
            b'epoch\t{"t": "soon"}\n',
            r"journals, line 1, is not a row of",
        ),
    ],
)
def test_a_damaged_file_gets_a_sentence(
    out: Path, killed: IterationJournal, name: str, content: bytes, sentence: str
) -> None:
    (out / "telemetry" / "journals" / name).write_bytes(content)
    with pytest.raises(EsperError, match=sentence):
        read_rows(out, EpochRow)


# --- an iteration that is being added ------------------------------------------------------------------


def add_by_halves(out: Path, *, with_its_own_row: bool) -> None:
    """As if the process had been killed while it wrote the tables of iteration 2."""
    with RunWriter(out, resumable=True) as writer:
        write_iteration(writer, 1)
        kept = IterationJournal(out, "standard", writer.began)
        kept.take(2, 0, [fake_run.epoch_row(epoch, episode=1) for epoch in (1, 2)])
        journal.begin_adding(out / "telemetry", 2, writer._sizes())
        writer.emit(fake_run.epoch_row(1, episode=1))
        if with_its_own_row:
            writer.emit(fake_run.epoch_row(2, episode=1))
            writer.emit(fake_run.update_row(2))
        writer.flush()


def test_half_an_iteration_in_the_tables_gives_way_to_its_journals(out: Path) -> None:
    add_by_halves(out, with_its_own_row=False)
    assert lived(out) == [(0, 0, 1), (0, 1, 1), (0, 1, 2)]


def test_half_an_iteration_does_not_count_while_the_run_is_written(out: Path) -> None:
    """Of a writer that is just adding it, or was stopped in it by a full disk."""
    run = Run(out)
    with RunWriter(out, resumable=True) as writer:
        write_iteration(writer, 1)
        with writer.adding_iteration(2):
            writer.emit(fake_run.epoch_row(1, episode=1))
            writer.flush()
            assert len(run.rows(EpochRow)) == 1
            writer.emit(fake_run.update_row(2))
        assert len(run.rows(EpochRow)) == 2


def test_a_whole_iteration_in_the_tables_makes_its_journals_superfluous(out: Path) -> None:
    add_by_halves(out, with_its_own_row=True)
    assert lived(out) == [(0, 0, 1), (0, 1, 1), (0, 1, 2)]
    assert [row.iteration for row in read_rows(out, UpdateRow)] == [1, 2]


@pytest.mark.parametrize("emitted", [0, 1, 2, 3])
def test_a_training_interrupted_while_it_hands_over_an_iteration_leaves_each_row_once(
    out: Path, emitted: int
) -> None:
    """The writer closes in good order, and takes what it was given before to the tables."""
    epochs = [fake_run.epoch_row(epoch, episode=1) for epoch in (1, 2)]
    with RunWriter(out, resumable=True) as writer:
        write_iteration(writer, 1)
        IterationJournal(out, "standard", writer.began).take(2, 0, epochs)
        with suppress(KeyboardInterrupt), writer.adding_iteration(2):
            for row in [*epochs, fake_run.update_row(2)][:emitted]:
                writer.emit(row)
            raise KeyboardInterrupt
    assert lived(out) == [(0, 0, 1), (0, 1, 1), (0, 1, 2)]
    assert len(read_rows(out, UpdateRow)) == (2 if emitted == 3 else 1)


# --- what is left in the end ----------------------------------------------------------------------


def test_a_run_whose_iterations_are_all_in_the_tables_leaves_no_journal(out: Path) -> None:
    with RunWriter(out, resumable=True) as writer:
        kept = IterationJournal(out, "standard", writer.began)
        kept.take(1, 0, [fake_run.epoch_row(1)])
        write_iteration(writer, 1)
    assert not (out / "telemetry" / "journals").exists()


def test_a_resumed_run_begins_without_the_journals_of_the_last_one(
    out: Path, killed: IterationJournal
) -> None:
    killed.take(2, 0, [fake_run.epoch_row(1, episode=1)])
    with RunWriter(out, resume_from={}):
        pass
    assert lived(out) == []
    assert not (out / "telemetry" / "journals").exists()


def test_a_run_killed_while_it_resumes_shows_no_half_of_an_iteration(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_by_halves(out, with_its_own_row=False)
    monkeypatch.setattr(TablePart, "cut", full_disk)  # as good as a kill before the first table is cut
    with pytest.raises(RunDirectoryError):
        RunWriter(out, resume_from={})
    assert lived(out) == [(0, 0, 1)]


def test_a_run_killed_again_in_an_earlier_iteration_reads_back(out: Path, killed: IterationJournal) -> None:
    writer = RunWriter(out, resume_from={})
    IterationJournal(out, "standard", writer.began).take(1, 0, [fake_run.epoch_row(1)])
    writer._lock.release()  # as the kernel does it for a process that was killed
    assert lived(out) == [(0, 0, 1)]


def test_a_file_of_somebody_else_among_the_journals_keeps_no_run_from_resuming(
    out: Path, killed: IterationJournal
) -> None:
    (out / "telemetry" / "journals" / ".nfs0001").touch()
    with RunWriter(out, resume_from={}) as writer:
        write_iteration(writer, 1)
    assert lived(out) == [(0, 0, 1)]


def test_an_iteration_leaves_the_folder_of_the_telemetry_as_it_is(out: Path) -> None:
    """By it readers that stay know a run from another one in the same place."""
    with RunWriter(out, resumable=True) as writer:
        write_iteration(writer, 1)
        before = (out / "telemetry").stat().st_ctime_ns
        IterationJournal(out, "standard", writer.began).take(2, 0, [fake_run.epoch_row(1, episode=1)])
        write_iteration(writer, 2)
        assert (out / "telemetry").stat().st_ctime_ns == before


def test_what_was_written_is_on_the_disk_before_it_has_its_name(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut would leave an empty file otherwise."""
    synced: list[int] = []
    named: list[int] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.fstat(file).st_ino), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda old, new: (named.append(old.stat().st_ino), replace(old, new)))
    with RunWriter(out, resumable=True) as writer:
        write_iteration(writer, 1)
    assert len(named) == 2
    assert synced == named


def test_a_disk_that_is_full_at_closing_too_ends_nothing(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RunWriter(out, resumable=True).close()
    kept = IterationJournal(out, "standard", 0.0)
    kept.take(1, 0, [fake_run.epoch_row(1)])
    monkeypatch.setattr(journal, "_write_all", full_disk)
    monkeypatch.setattr(os, "close", full_disk)
    kept.take(1, 0, [fake_run.epoch_row(2)])
    monkeypatch.undo()
    assert lived(out) == [(0, 0, 1)]


def test_a_journal_on_a_full_disk_is_given_up_until_the_next_shard(
    out: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    RunWriter(out, resumable=True).close()
    kept = IterationJournal(out, "standard", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(journal, "_write_all", full_disk)
        kept.take(1, 0, [fake_run.epoch_row(1)])
    kept.take(1, 0, [fake_run.epoch_row(2)])
    kept.take(1, 2, [fake_run.epoch_row(1, env=2)])
    assert lived(out) == [(2, 0, 1)]
    assert capfd.readouterr().err == ""


def test_half_an_iteration_without_journals_does_not_count_after_a_full_disk_either(
    out: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with RunWriter(out, resumable=True) as writer:
        write_iteration(writer, 1)
        monkeypatch.setattr(writer._parts["update"], "write_out", full_disk)
        write_iteration(writer, 2)
    assert lived(out) == [(0, 0, 1)]
    assert capfd.readouterr().err.count("telemetry stopped") == 1


def test_when_telemetry_has_ended_no_journal_piles_up(
    out: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with RunWriter(out, resumable=True) as writer:
        kept = IterationJournal(out, "standard", writer.began)
        write_iteration(writer, 1)
        kept.take(2, 0, [fake_run.epoch_row(1, episode=1)])
        monkeypatch.setattr(journal, "_say", full_disk)
        write_iteration(writer, 2)
        for number in (3, 4):
            kept.take(number, 0, [fake_run.epoch_row(1, episode=number - 1)])
            write_iteration(writer, number)
    assert lived(out) == [(0, 0, 1), (0, 1, 1)], "the iteration at which it ended is all in its journal"
    assert capfd.readouterr().err.count("telemetry stopped") == 1
