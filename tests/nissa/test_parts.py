import errno
import os
import random
import subprocess
import sys
from pathlib import Path

import duckdb
import msgspec
import pytest

from esper.karn.query import read_rows
from esper.karn.run import open_run
from esper.leyline.columns import COLUMNS
from esper.leyline.errors import EsperError, RunDirectoryError
from esper.leyline.events import TABLES, AlertRow, DecisionRow, EpochRow, Row, UpdateRow
from esper.nissa import writer as writer_module
from esper.nissa.compaction import CompactionError, Compactor
from esper.nissa.writer import RunWriter
from tests.karn import fake_run


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that are full with two rows or three."""
    monkeypatch.setattr(writer_module, "PART_BYTES", 500)


def names(run: Path, table: str) -> list[str]:
    return sorted(path.name for path in (run / "telemetry" / table).iterdir())


def write_epochs(writer: RunWriter, *epochs: int) -> None:
    for epoch in epochs:
        row = fake_run.epoch_row(1)
        row.epoch = epoch
        writer.emit(row)
    writer.flush()


def epochs_of(run: Path) -> list[int]:
    return [row.epoch for row in read_rows(run, EpochRow)]


def compact_by_hand(run: Path, table: str, below: int = 1) -> None:
    Compactor().compact(run / "telemetry" / table, table, below)


# --- Parquet holds what the lines held ------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES)
def test_a_row_of_every_table_is_the_same_from_parquet(tmp_path, table):
    row = fake_run.one_row_of_each_table()[table]
    with RunWriter(tmp_path) as writer:
        writer.emit(row)
    lines = read_rows(tmp_path, table)

    compact_by_hand(tmp_path, table)

    assert names(tmp_path, table) == ["part-00000.parquet"]
    assert read_rows(tmp_path, table) == lines


@pytest.mark.parametrize("table", TABLES)
def test_types_come_from_the_schema_also_where_all_is_unknown(tmp_path, table):
    """The optional columns of this row are all null, and its lists and maps are empty."""
    row = _emptied(fake_run.one_row_of_each_table()[table])
    with RunWriter(tmp_path) as writer:
        writer.emit(row)
    compact_by_hand(tmp_path, table)

    part = tmp_path / "telemetry" / table / "part-00000.parquet"
    described = duckdb.sql(f"DESCRIBE FROM read_parquet('{part}')").fetchall()
    assert [(name, kind) for name, kind, *_ in described] == [(c.name, c.sql_type) for c in COLUMNS[table]]
    assert read_rows(tmp_path, table)[0] == row


def _emptied(row: Row) -> Row:
    for column in COLUMNS[{type(r): t for t, r in fake_run.one_row_of_each_table().items()}[type(row)]]:
        value = getattr(row, column.name)
        if column.may_be_unknown:
            setattr(row, column.name, None)
        elif isinstance(value, list | dict):
            setattr(row, column.name, type(value)())
    return row


def test_numbers_and_texts_come_back_bit_for_bit(tmp_path):
    stream = random.Random(7)
    rows = []
    for number in range(300):
        row = fake_run.policy_decision_row(number)
        row.value = stream.uniform(-1, 1) * 10.0 ** stream.randint(-300, 300)
        row.log_probs = [stream.gauss(0, 1), 5e-324, -0.0, 1e22, 0.1 + 0.2, None, 1.7976931348623157e308]
        row.reward_terms = {"a \u2028 ± \x00": stream.random(), "": None, 'quote"\\': 1e-7}
        row.refused_by = stream.choice([None, "", "null", "line\nbreak\r\ttab", "\U0001f33f"])
        row.env = stream.randint(-(2**63), 2**63 - 1)
        rows.append(row)
    with RunWriter(tmp_path) as writer:
        for row in rows:
            writer.emit(row)
    assert read_rows(tmp_path, DecisionRow) == rows

    compact_by_hand(tmp_path, "decision")

    found = read_rows(tmp_path, DecisionRow)
    assert found == rows
    assert msgspec.json.encode(found) == msgspec.json.encode(rows)  # -0.0 too, which equals 0.0


# --- parts close and become Parquet ---------------------------------------------------------------


def test_a_full_part_becomes_parquet_at_flush_and_another_one_begins(tmp_path):
    with RunWriter(tmp_path) as writer:
        write_epochs(writer, 0, 1)
        assert names(tmp_path, "epoch") == ["part-00000.parquet"]
        write_epochs(writer, 2)
        assert names(tmp_path, "epoch") == ["part-00000.parquet", "part-00001.jsonl"]
        write_epochs(writer, 3)
        write_epochs(writer, 4, 5, 6)

    assert names(tmp_path, "epoch") == [f"part-0000{number}.parquet" for number in range(3)]
    assert epochs_of(tmp_path) == [0, 1, 2, 3, 4, 5, 6]


def test_where_a_part_is_there_as_both_parquet_counts(tmp_path):
    with RunWriter(tmp_path) as writer:
        write_epochs(writer, 0)
    lines = (tmp_path / "telemetry" / "epoch" / "part-00000.jsonl").read_bytes()
    compact_by_hand(tmp_path, "epoch")
    (tmp_path / "telemetry" / "epoch" / "part-00000.jsonl").write_bytes(lines[:-9])  # so that one sees which
    assert names(tmp_path, "epoch") == ["part-00000.jsonl", "part-00000.parquet"]

    assert epochs_of(tmp_path) == [0]

    compact_by_hand(tmp_path, "epoch")
    assert names(tmp_path, "epoch") == ["part-00000.parquet"]


def test_lines_between_two_parquet_parts_keep_their_place(tmp_path):
    with RunWriter(tmp_path) as writer:
        for epoch in range(0, 6, 2):
            write_epochs(writer, epoch, epoch + 1)
    part = tmp_path / "telemetry" / "epoch" / "part-00001.parquet"
    rows = [fake_run.epoch_row(1), fake_run.epoch_row(1)]
    rows[0].epoch, rows[1].epoch = 2, 3
    part.unlink()
    part.with_suffix(".jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))

    assert epochs_of(tmp_path) == [0, 1, 2, 3, 4, 5]


def test_a_part_that_is_gone_is_a_sentence(tmp_path):
    with RunWriter(tmp_path) as writer:
        for epoch in range(0, 6, 2):
            write_epochs(writer, epoch, epoch + 1)
    (tmp_path / "telemetry" / "epoch" / "part-00001.parquet").unlink()

    with pytest.raises(EsperError, match=r"epoch' is damaged: part 1 is gone and later ones are there"):
        read_rows(tmp_path, "epoch")


def test_a_damaged_parquet_part_is_a_sentence(tmp_path):
    with RunWriter(tmp_path) as writer:
        write_epochs(writer, 0, 1)
    part = tmp_path / "telemetry" / "epoch" / "part-00000.parquet"
    part.write_bytes(part.read_bytes()[:-20])

    with pytest.raises(EsperError, match=r"part-00000\.parquet"):
        read_rows(tmp_path, "epoch")


# --- what cannot be converted stays lines ---------------------------------------------------------


def assert_lines_are_left(run: Path, count: int) -> None:
    assert names(run, "epoch") == [f"part-{number:05d}.jsonl" for number in range(count)]


def test_a_failed_conversion_leaves_the_lines_and_one_alert_and_the_run_goes_on(tmp_path, monkeypatch):
    warnings: list[str] = []

    def full_disk(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with RunWriter(tmp_path, warnings.append) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full_disk)
            write_epochs(writer, 0, 1)
            write_epochs(writer, 2, 3)
        assert_lines_are_left(tmp_path, 2)
        assert epochs_of(tmp_path) == [0, 1, 2, 3]
        write_epochs(writer, 4, 5)  # what was left is made up for

    assert warnings == []
    assert epochs_of(tmp_path) == [0, 1, 2, 3, 4, 5]
    assert names(tmp_path, "epoch") == [f"part-0000{number}.parquet" for number in range(3)]
    (alert,) = read_rows(tmp_path, AlertRow)
    assert (alert.rule, alert.severity, alert.event) == ("compaction", "warning", "raised")
    assert alert.hint.startswith("a part stays JSON lines, which readers take as well: ")
    assert "No space left on device" in alert.hint


@pytest.mark.parametrize("damage", [b'{"t":1.0,"env"', b'{"t":"soon"}\n', b"\xff\xfe\n"])
def test_lines_that_are_no_rows_are_never_converted(tmp_path, damage):
    with RunWriter(tmp_path) as writer:
        write_epochs(writer, 0)
        with (tmp_path / "telemetry" / "epoch" / "part-00000.jsonl").open("ab") as file:
            file.write(damage)
        before = (tmp_path / "telemetry" / "epoch" / "part-00000.jsonl").read_bytes()
        write_epochs(writer, 1)
    after = (tmp_path / "telemetry" / "epoch" / "part-00000.jsonl").read_bytes()

    assert after.startswith(before)
    assert [row.rule for row in read_rows(tmp_path, AlertRow)] == ["compaction"]
    assert names(tmp_path, "epoch") == ["part-00000.jsonl"]


def test_a_part_whose_last_line_is_not_ended_is_not_converted(tmp_path):
    with RunWriter(tmp_path) as writer:
        write_epochs(writer, 0)
    part = tmp_path / "telemetry" / "epoch" / "part-00000.jsonl"
    part.write_bytes(part.read_bytes()[:-1])

    with pytest.raises(CompactionError, match=r"part-00000\.jsonl: 1 rows for 0 whole lines"):
        compact_by_hand(tmp_path, "epoch")
    assert names(tmp_path, "epoch") == ["part-00000.jsonl"]


WRITE_WITHOUT_ROOM = """
import resource, signal, sys
from pathlib import Path
from esper.nissa import writer as module
from esper.nissa.writer import RunWriter
from tests.karn import fake_run

module.PART_BYTES = 20_000
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
warnings = []
with RunWriter(Path(sys.argv[1]), warnings.append) as writer:
    limit = int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    for epoch in range(int(sys.argv[3])):
        writer.emit(fake_run.policy_decision_row(epoch))
        writer.flush()
print(len(warnings), *warnings)
"""


def write_without_room(run: Path, limit: int, rows: int) -> str:
    root = Path(__file__).parents[2]
    finished = subprocess.run(
        [sys.executable, "-c", WRITE_WITHOUT_ROOM, str(run), str(limit), str(rows)],
        cwd=root,
        env={"PYTHONPATH": f"{root / 'src'}:{root}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert finished.stderr == ""
    return finished.stdout.strip()


def test_files_that_may_not_grow_end_telemetry_with_one_sentence(tmp_path):
    """A row takes about 500 bytes; no file may hold more than 10,000."""
    said = write_without_room(tmp_path / "run", 10_000, 100)

    assert said.startswith("1 telemetry stopped: cannot write ")
    assert said.endswith("the run goes on, its further rows are lost")
    epochs = [row.epoch for row in read_rows(tmp_path / "run", DecisionRow)]
    assert epochs == list(range(len(epochs)))
    assert 15 < len(epochs) < 30


# --- a run that can be resumed --------------------------------------------------------------------


def test_parts_of_a_resumable_run_close_at_checkpoints_and_are_converted_when_it_is_stored(tmp_path):
    with RunWriter(tmp_path, resumable=True) as writer:
        write_epochs(writer, 0, 1, 2)
        write_epochs(writer, 3)
        assert names(tmp_path, "epoch") == ["part-00000.jsonl"]
        with writer.checkpoint() as sizes:
            assert sizes["epoch"][:2] == (1, 0)
            assert sizes["run"] == (0, 0, 0.0)
            assert names(tmp_path, "epoch") == ["part-00000.jsonl"]
        assert names(tmp_path, "epoch") == ["part-00000.parquet"]

    assert epochs_of(tmp_path) == [0, 1, 2, 3]


def test_a_checkpoint_that_could_not_be_stored_leaves_parts_that_can_be_cut(tmp_path):
    with RunWriter(tmp_path, resumable=True) as writer:
        write_epochs(writer, 0)
        with writer.checkpoint() as stored:
            pass
        write_epochs(writer, 1, 2)
        with pytest.raises(RuntimeError, match="power"), writer.checkpoint():
            raise RuntimeError("power")
        write_epochs(writer, 3)
    assert names(tmp_path, "epoch") == ["part-00000.jsonl", "part-00001.jsonl"]

    with RunWriter(tmp_path, resume_from=stored) as writer:
        assert names(tmp_path, "epoch") == ["part-00000.jsonl"]
        assert epochs_of(tmp_path) == [0]
        write_epochs(writer, 1, 2, 3)
        assert names(tmp_path, "epoch") == ["part-00000.jsonl"]

    assert epochs_of(tmp_path) == [0, 1, 2, 3]


def test_what_is_not_flushed_is_no_part_of_a_checkpoint(tmp_path):
    with RunWriter(tmp_path, resumable=True) as writer:
        write_epochs(writer, 0)
        writer.emit(fake_run.epoch_row(7))
        with writer.checkpoint() as sizes:
            pass
    with RunWriter(tmp_path, resume_from=sizes):
        pass

    assert epochs_of(tmp_path) == [0]


def test_time_goes_on_where_a_resumed_run_left_off(tmp_path):
    """Two seconds until the checkpoint, a break, then one second more."""
    now = 100.0
    with RunWriter(tmp_path, resumable=True, clock=lambda: now) as writer:
        now = 102.0
        write_epochs(writer, 0)
        with writer.checkpoint() as sizes:
            pass
        now = 150.0
        write_epochs(writer, 1)
    now = 500.0
    with RunWriter(tmp_path, resume_from=sizes, clock=lambda: now) as writer:
        now = 501.0
        write_epochs(writer, 1)

    assert [row.t for row in read_rows(tmp_path, EpochRow)] == [2.0, 3.0]


# --- one writer at a time -------------------------------------------------------------------------


def test_a_second_writer_is_refused_as_long_as_the_first_episodes(tmp_path):
    with RunWriter(tmp_path, resumable=True) as writer:
        write_epochs(writer, 0)
        with writer.checkpoint() as sizes:
            pass
        write_epochs(writer, 1)
        with pytest.raises(RunDirectoryError, match="is being written by another process; let it finish"):
            RunWriter(tmp_path, resume_from=sizes)
    assert epochs_of(tmp_path) == [0, 1]

    RunWriter(tmp_path, resume_from=sizes).close()
    assert epochs_of(tmp_path) == [0]


def test_readers_that_look_at_the_lock_keep_no_writer_out(tmp_path):
    RunWriter(tmp_path, resumable=True).close()
    code = (
        "import sys; from esper.karn.run import open_run; run = open_run(sys.argv[1])\n"
        "print('ready', flush=True)\n"
        "while True: run.state"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        env={"PYTHONPATH": str(root / "src")},
        stdout=subprocess.PIPE,
    ) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        for _ in range(50):
            RunWriter(tmp_path, resume_from={}).close()
        reader.kill()


def test_a_run_is_running_while_its_writer_episodes(tmp_path):
    with RunWriter(tmp_path) as writer:
        writer.emit(fake_run.run_row())
        writer.flush()
        assert open_run(tmp_path).state == "running"
    assert open_run(tmp_path).state == "stopped"


# --- detail ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("detail", "missing"),
    [
        ("full", set()),
        ("standard", {"seed", "counterfactual"}),
        ("summary", {"seed", "counterfactual", "epoch", "decision"}),
    ],
)
def test_a_level_of_detail_leaves_tables_out(tmp_path, detail, missing):
    with RunWriter(tmp_path, detail=detail) as writer:
        for row in fake_run.one_row_of_each_table().values():
            writer.emit(row)

    assert {table for table in TABLES if not read_rows(tmp_path, table)} == missing


def test_detail_may_change_while_a_run_goes_on(tmp_path):
    with RunWriter(tmp_path, detail="summary") as writer:
        write_epochs(writer, 0)
        writer.detail = "full"
        write_epochs(writer, 1)
        writer.detail = "summary"
        write_epochs(writer, 2)
        writer.emit(fake_run.update_row(1))

    assert epochs_of(tmp_path) == [1]
    assert len(read_rows(tmp_path, UpdateRow)) == 1


def test_a_row_that_is_dropped_is_stamped_for_those_who_watch(tmp_path):
    now = 0.0
    with RunWriter(tmp_path, detail="summary", clock=lambda: now) as writer:
        now = 1.5
        row = fake_run.epoch_row(1)
        writer.emit(row)

    assert row.t == 1.5
