import shutil
from collections.abc import Iterable
from itertools import chain

import pytest

from esper.karn.tail import FOLLOWED, LIVED, Tail
from esper.leyline.errors import EsperError
from esper.leyline.events import DecisionRow, EpisodeRow, Row
from esper.nissa import writer as writer_module
from esper.nissa.compaction import Compactor
from esper.nissa.writer import RunWriter
from tests.karn import fake_run, fake_training


def emit(writer: RunWriter, rows: Iterable[Row]) -> list[Row]:
    """Write the rows out; those that are followed."""
    rows = list(rows)
    for row in rows:
        writer.emit(row)
    writer.flush()
    return [row for row in rows if type(row) in FOLLOWED]


def decisions(*epochs: int) -> list[Row]:
    return [fake_run.decision_row(epoch) for epoch in epochs]


def epochs_of(rows: Iterable[Row]) -> list[int]:
    return [row.epoch for row in rows if isinstance(row, DecisionRow)]


def test_rows_come_in_the_order_in_which_they_were_emitted(tmp_path):
    with RunWriter(tmp_path / "run") as writer:
        rows = emit(writer, chain([fake_run.run_row()], fake_run.episode(), [fake_run.counterfactual_row(3)]))

    assert Tail(tmp_path / "run").read() == rows


def test_an_iteration_comes_in_the_order_in_which_it_was_emitted(tmp_path):
    with RunWriter(tmp_path / "run") as writer:
        rows = emit(writer, fake_training.troubled_course(3))

    assert Tail(tmp_path / "run").read() == rows


def test_every_row_comes_once(tmp_path):
    with RunWriter(tmp_path / "run") as writer:
        tail = Tail(tmp_path / "run")
        assert tail.read() == []
        first = emit(writer, [fake_run.run_row(), *fake_run.episode(0)])
        assert tail.read() == first
        assert tail.read() == []
        second = emit(writer, fake_run.episode(1))
        assert tail.read() == second


def test_a_line_that_is_being_written_is_waited_for(tmp_path):
    with RunWriter(tmp_path / "run") as writer:
        emit(writer, decisions(1, 2))
    part = tmp_path / "run/telemetry/decision/part-00000.jsonl"
    whole = part.read_bytes()
    tail = Tail(tmp_path / "run")

    part.write_bytes(whole[:-20])
    assert epochs_of(tail.read()) == [1]
    part.write_bytes(whole[:-1])
    assert epochs_of(tail.read()) == []
    part.write_bytes(whole)
    assert epochs_of(tail.read()) == [2]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that are full with two rows or three."""
    monkeypatch.setattr(writer_module, "PART_BYTES", 500)


@pytest.mark.usefixtures("small_parts")
def test_parts_that_became_parquet_are_read_on_where_they_were_left(tmp_path):
    tail = Tail(tmp_path / "run")
    with RunWriter(tmp_path / "run") as writer:
        emit(writer, decisions(1))
        assert epochs_of(tail.read()) == [1]
        emit(writer, decisions(2, 3))  # closes the part, in which the first row was
        assert [path.suffix for path in (tmp_path / "run/telemetry/decision").iterdir()] == [".parquet"]
        assert epochs_of(tail.read()) == [2, 3]
        assert epochs_of(tail.read()) == []
        emit(writer, decisions(4))
        assert epochs_of(tail.read()) == [4]
        emit(writer, decisions(5, 6, 7))
        emit(writer, decisions(8, 9, 10))
        emit(writer, decisions(11))
        assert epochs_of(tail.read()) == [5, 6, 7, 8, 9, 10, 11]


@pytest.mark.usefixtures("small_parts")
def test_a_parquet_part_is_read_once_and_not_at_every_look(tmp_path, monkeypatch):
    from esper.karn import tail as module

    reads: list[object] = []
    original = module._parquet_lines
    monkeypatch.setattr(module, "_parquet_lines", lambda *args: reads.append(args) or original(*args))
    with RunWriter(tmp_path / "run") as writer:
        emit(writer, decisions(1, 2, 3))
        tail = Tail(tmp_path / "run")
        for _ in range(5):
            tail.read()

    assert len(reads) == 1


def test_rows_of_every_table_are_the_same_from_parquet(tmp_path):
    with RunWriter(tmp_path / "run") as writer:
        rows = emit(writer, fake_training.troubled_course(3))
    for folder in (tmp_path / "run/telemetry").iterdir():
        if folder.is_dir():
            Compactor().compact(folder, folder.name, 1)

    assert Tail(tmp_path / "run").read() == rows


@pytest.mark.parametrize("compacted", [False, True])
def test_a_view_that_begins_late_gets_the_episodes_of_the_last_iteration_only(tmp_path, compacted):
    with RunWriter(tmp_path / "run") as writer:
        rows = emit(writer, chain([fake_training.run_row()], *map(fake_training.iteration_rows, (1, 2, 3))))
    if compacted:
        for table in ("decision", "epoch", "seed", "transition", "update"):
            Compactor().compact(tmp_path / "run/telemetry" / table, table, 1)
    latest = Tail(tmp_path / "run").read_latest()

    assert latest == [row for row in rows if type(row) not in LIVED or row.episode == 2]
    assert sum(isinstance(row, EpisodeRow) for row in latest) == 3 * fake_training.ENVS


def test_a_run_that_is_no_training_is_read_whole(tmp_path):
    with RunWriter(tmp_path / "run") as writer:
        rows = emit(writer, chain([fake_run.run_row()], fake_run.episode(0), fake_run.episode(1)))

    assert Tail(tmp_path / "run").read_latest() == rows


@pytest.mark.parametrize("later", [(13,), (13, 14, 15, 16)], ids=["shorter", "longer"])
def test_where_a_resumed_run_has_cut_off_what_was_read_all_is_read_again(tmp_path, later):
    """The run is resumed between two looks, and its file is shorter or longer than it was."""
    tail = Tail(tmp_path / "run")
    with RunWriter(tmp_path / "run", resumable=True) as writer:
        emit(writer, decisions(1, 2))
        with writer.checkpoint() as sizes:
            kept = dict(sizes)
        emit(writer, decisions(3, 4))
        assert epochs_of(tail.read()) == [1, 2, 3, 4]
        assert not tail.is_anew
    with RunWriter(tmp_path / "run", resume_from=kept) as writer:
        emit(writer, decisions(*later))
        assert epochs_of(tail.read()) == [1, 2, *later]
        assert tail.is_anew
        emit(writer, decisions(17))
        assert epochs_of(tail.read()) == [17]
        assert not tail.is_anew


def test_a_cut_in_one_table_begins_all_tables_anew(tmp_path):
    tail = Tail(tmp_path / "run")
    with RunWriter(tmp_path / "run", resumable=True) as writer:
        first = emit(writer, fake_training.course(2))
        with writer.checkpoint() as sizes:
            kept = dict(sizes)
        emit(writer, [fake_training.alert_row("kl_high", 2)])
        tail.read()
    with RunWriter(tmp_path / "run", resume_from=kept) as writer:
        later = emit(writer, fake_training.iteration_rows(3))

        # Of what was lived, only the last iteration is read again.
        kept_rows = [row for row in first if type(row) not in LIVED]
        assert tail.read() == [*kept_rows, *later]
        assert tail.is_anew


def test_a_run_that_is_gone_and_another_one_in_its_place_are_begun_anew(tmp_path):
    tail = Tail(tmp_path / "run")
    with RunWriter(tmp_path / "run") as writer:
        emit(writer, decisions(1, 2))
    assert epochs_of(tail.read()) == [1, 2]
    shutil.rmtree(tmp_path / "run")
    assert tail.read() == []
    assert tail.is_anew
    with RunWriter(tmp_path / "run") as writer:
        emit(writer, decisions(3, 4))

    assert epochs_of(tail.read()) == [3, 4]


def test_what_a_resumed_run_cut_off_before_it_was_read_is_no_matter(tmp_path):
    tail = Tail(tmp_path / "run")
    with RunWriter(tmp_path / "run", resumable=True) as writer:
        emit(writer, decisions(1, 2))
        with writer.checkpoint() as sizes:
            kept = dict(sizes)
        assert epochs_of(tail.read()) == [1, 2]
        emit(writer, decisions(3, 4))
    with RunWriter(tmp_path / "run", resume_from=kept) as writer:
        emit(writer, decisions(13))

        assert epochs_of(tail.read()) == [13]
        assert not tail.is_anew


def test_what_a_resumed_run_writes_later_is_read_once(tmp_path):
    tail = Tail(tmp_path / "run")
    with RunWriter(tmp_path / "run", resumable=True) as writer:
        emit(writer, decisions(1, 2))
        with writer.checkpoint() as sizes:
            kept = dict(sizes)
        emit(writer, decisions(3, 4))
        assert epochs_of(tail.read()) == [1, 2, 3, 4]
    with RunWriter(tmp_path / "run", resume_from=kept) as writer:
        assert epochs_of(tail.read()) == [1, 2]
        emit(writer, decisions(13))
        assert epochs_of(tail.read()) == [13]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("later", [(), (14,), (14, 15, 16), (14, 15, 16, 17, 18, 19, 20)])
def test_a_resumed_run_may_have_cut_off_whole_parts(tmp_path, later):
    tail = Tail(tmp_path / "run")
    with RunWriter(tmp_path / "run", resumable=True) as writer:
        emit(writer, decisions(1, 2, 3))
        with writer.checkpoint() as sizes:
            kept = dict(sizes)
        emit(writer, decisions(4, 5, 6))
        with pytest.raises(OSError, match="full"), writer.checkpoint():
            raise OSError("the disk is full")
        emit(writer, decisions(7))
        assert epochs_of(tail.read()) == [1, 2, 3, 4, 5, 6, 7]
    assert kept["decision"][:2] == (1, 0)
    with RunWriter(tmp_path / "run", resume_from=kept) as writer:
        emit(writer, decisions(*later))
        assert epochs_of(tail.read()) == [1, 2, 3, *later]
        emit(writer, decisions(24))
        assert epochs_of(tail.read()) == [24]


@pytest.mark.usefixtures("small_parts")
def test_a_closed_part_may_be_cut_too_if_its_checkpoint_was_not_stored(tmp_path):
    """The tail has gone on to the next part, of which there is no row yet."""
    tail = Tail(tmp_path / "run")
    with RunWriter(tmp_path / "run", resumable=True) as writer:
        emit(writer, decisions(1))
        with writer.checkpoint() as sizes:
            kept = dict(sizes)
        emit(writer, decisions(2, 3))
        with pytest.raises(OSError, match="full"), writer.checkpoint():
            raise OSError("the disk is full")
        emit(writer, decisions(4))
        assert epochs_of(tail.read()) == [1, 2, 3, 4]
    (tmp_path / "run/telemetry/decision/part-00001.jsonl").unlink()
    with RunWriter(tmp_path / "run", resume_from=kept) as writer:
        emit(writer, decisions(12, 13, 14, 15))

        assert epochs_of(tail.read()) == [1, 12, 13, 14, 15]


def test_a_resumed_run_comes_in_the_order_of_its_iterations(tmp_path):
    with RunWriter(tmp_path / "run", resumable=True) as writer:
        rows = emit(writer, fake_training.course(1))
        with writer.checkpoint() as sizes:
            kept = dict(sizes)
    with RunWriter(tmp_path / "run", resume_from=kept) as writer:
        rows += emit(writer, fake_training.iteration_rows(2))

    assert Tail(tmp_path / "run").read() == rows


def test_a_line_that_is_no_row_is_named(tmp_path):
    with RunWriter(tmp_path / "run") as writer:
        emit(writer, decisions(1))
    part = tmp_path / "run/telemetry/decision/part-00000.jsonl"
    part.write_bytes(part.read_bytes() + b"{}\n")

    with pytest.raises(EsperError, match=r"part-00000\.jsonl holds a line that is not a row of this table"):
        Tail(tmp_path / "run").read()


def test_reading_leaves_the_directory_as_it_was(tmp_path):
    with RunWriter(tmp_path / "run") as writer:
        emit(writer, [fake_run.run_row(), *fake_run.episode()])
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    Tail(tmp_path / "run").read()

    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
