"""Compaction of telemetry from JSON lines to Parquet: equal content, and failures that keep the lines."""

import os
import random
from pathlib import Path

import duckdb
import msgspec
import pytest
from msgspec.structs import replace

from esper.karn.run import Run, read_rows
from esper.leyline.columns import COLUMNS
from esper.leyline.errors import EsperError
from esper.leyline.rows import TABLES, AlertRow, DecisionRow, EpochRow, Row
from esper.nissa import compaction
from esper.nissa import writer as writer_module
from esper.nissa.writer import RunWriter
from tests.integration.training import full_disk
from tests.karn import fake_run, made_run


@pytest.fixture(autouse=True)
def few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the size limit of a JSON Lines file to between one and two epoch rows."""
    monkeypatch.setattr(writer_module, "LINES_BYTES", 500)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "telemetry").glob("rows-*"))


def write_epochs(writer: RunWriter, *epochs: int) -> None:
    for epoch in epochs:
        writer.emit(replace(fake_run.epoch_row(1), epoch=epoch))
    writer.flush()


def epochs_of(run: Path) -> list[int]:
    return [row.epoch for row in read_rows(run, EpochRow)]


def compact_by_hand(run: Path) -> None:
    compaction.compact(run / "telemetry", last=0)
    assert names(run) == ["rows-00000-00000"]


# --- Parquet equals the lines -----------------------------------------------------------------------


def emptied(table: str, row: Row) -> Row:
    """Return a copy of a telemetry row with null in every optional column, and with empty lists and maps.

    The copy of an episode row is about another attempt, because an episode has one row. Names in the run
    row and indices that refer to them are kept.
    """
    changes: dict[str, object] = {"attempt": 1} if table == "episode" else {}
    for column in COLUMNS[table]:
        if column.unit == "indices" or (table == "run" and column.unit == "names"):
            continue
        value = getattr(row, column.name)
        if column.may_be_unknown:
            changes[column.name] = None
        elif isinstance(value, list | dict):
            changes[column.name] = type(value)()
    return replace(row, **changes)


def test_parquet_rows_of_every_table_equal_the_json_lines_and_have_the_schema_types(tmp_path: Path) -> None:
    whole = fake_run.one_row_of_each_table()
    with RunWriter(tmp_path, clock=lambda: 0.0) as writer:
        for table, row in whole.items():
            writer.emit(emptied(table, row))
            # A run may have only one run row.
            if table != "run":
                writer.emit(row)
    written = Run(tmp_path)
    lines = {table: written.rows(kind) for table, kind in TABLES.items()}

    compact_by_hand(tmp_path)

    compacted = Run(tmp_path)
    for table, row in whole.items():
        file = tmp_path / "telemetry" / "rows-00000-00000" / f"{table}.parquet"
        described = duckdb.sql(f"DESCRIBE FROM read_parquet('{file}')").fetchall()
        assert [(name, kind) for name, kind, *_ in described] == [
            (column.name, column.sql_type) for column in COLUMNS[table]
        ]
        found = compacted.rows(TABLES[table])
        assert found == lines[table]
        assert found[:2] == [emptied(table, row), row][: 1 if table == "run" else 2]


def test_numbers_and_texts_are_bit_equal_after_compaction_to_parquet(tmp_path: Path) -> None:
    stream = random.Random(7)
    rows = [
        replace(
            fake_run.policy_decision_row(number),
            value=stream.uniform(-1, 1) * 10.0 ** stream.randint(-300, 300),
            log_probs=[stream.gauss(0, 1), 5e-324, -0.0, 1e22, 0.1 + 0.2, None, 1.7976931348623157e308],
            reward_terms={"a \u2028 ± \x00": stream.random(), "": None, 'quote"\\': 1e-7},
            refused_by=stream.choice([None, "", "null", "line\nbreak\r\ttab", "\U0001f33f"]),
            env=stream.randint(-(2**63), 2**63 - 1),
        )
        for number in range(300)
    ]
    made_run.write(tmp_path, rows, tick=0.0)
    assert read_rows(tmp_path, DecisionRow) == rows

    compact_by_hand(tmp_path)

    found = read_rows(tmp_path, DecisionRow)
    # Rows are compared as JSON text, which distinguishes -0.0 from 0.0.
    assert msgspec.json.encode(found) == msgspec.json.encode(rows)


# --- when lines are converted -----------------------------------------------------------------------


def test_json_lines_above_the_size_limit_are_compacted_at_flush_and_a_new_file_starts(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        write_epochs(writer, 0, 1)
        assert names(tmp_path) == ["rows-00000-00000"]
        write_epochs(writer, 2)
        assert names(tmp_path) == ["rows-00000-00000", "rows-00001.jsonl"]
        write_epochs(writer, 3)
        write_epochs(writer, 4, 5, 6)

    assert names(tmp_path) == [
        *(f"rows-0000{number}-0000{number}" for number in range(3)),
        "rows-00003.jsonl",
    ]
    assert epochs_of(tmp_path) == [0, 1, 2, 3, 4, 5, 6]


def test_json_lines_of_a_training_are_compacted_when_a_checkpoint_is_stored(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        for number in range(3):
            with writer.iteration(number):
                writer.emit(fake_run.epoch_row(number))
        with writer.checkpoint():
            assert names(tmp_path) == [f"rows-0000{number}.jsonl" for number in range(3)]
        assert names(tmp_path) == ["rows-00000-00002"]
        with writer.iteration(3):
            write_epochs(writer, 3, 4)
        with pytest.raises(RuntimeError, match="power"), writer.checkpoint():
            raise RuntimeError("power")
        assert names(tmp_path) == ["rows-00000-00002", "rows-00003.jsonl"]

    assert epochs_of(tmp_path) == [0, 1, 2, 3, 4]


def test_rows_are_read_from_parquet_not_json_lines_and_damaged_parquet_is_reported(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        write_epochs(writer, 0)
    path = tmp_path / "telemetry" / "rows-00000.jsonl"
    lines = path.read_bytes()
    compact_by_hand(tmp_path)
    # The JSON Lines file is truncated, so rows can only come from Parquet.
    path.write_bytes(lines[:-9])

    assert epochs_of(tmp_path) == [0]
    compact_by_hand(tmp_path)
    file = tmp_path / "telemetry" / "rows-00000-00000" / "epoch.parquet"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(EsperError, match=r"epoch\.parquet"):
        read_rows(tmp_path, TABLES["epoch"])


@pytest.mark.parametrize("number", [0, 1])
def test_missing_telemetry_file_is_reported_as_damage(tmp_path: Path, number: int) -> None:
    with RunWriter(tmp_path) as writer:
        for iteration in range(3):
            with writer.iteration(iteration):
                writer.emit(fake_run.epoch_row(iteration))
    (tmp_path / "telemetry" / f"rows-0000{number}.jsonl").unlink()

    with pytest.raises(EsperError, match=rf"is damaged: rows-0000{number + 1}.jsonl does not follow"):
        read_rows(tmp_path, TABLES["epoch"])


# --- failed conversion ------------------------------------------------------------------------------


def test_failed_compaction_keeps_the_json_lines_and_writes_one_alert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunWriter(tmp_path) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", full_disk)
            write_epochs(writer, 0, 1)
            write_epochs(writer, 2, 3)
        assert names(tmp_path) == ["rows-00000.jsonl", "rows-00001.jsonl"]
        assert epochs_of(tmp_path) == [0, 1, 2, 3]
        # The next compaction includes the lines that the failed compaction left.
        write_epochs(writer, 4, 5)

    assert capsys.readouterr().err == ""
    assert epochs_of(tmp_path) == [0, 1, 2, 3, 4, 5]
    assert names(tmp_path) == ["rows-00000-00002", "rows-00003.jsonl"]
    (alert,) = read_rows(tmp_path, AlertRow)
    assert (alert.rule, alert.severity, alert.event) == ("compaction", "warning", "raised")
    assert "No space left on device" in alert.hint


@pytest.mark.parametrize(
    "damage", [b'{"table":"epoch","t":1.0,"env"', b'{"table":"epoch","t":"soon"}\n', b"\xff\xfe\n", b"{}\n"]
)
def test_invalid_json_lines_are_never_compacted(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "telemetry" / "rows-00000.jsonl"
    with RunWriter(tmp_path) as writer:
        write_epochs(writer, 0)
        with path.open("ab") as file:
            file.write(damage)
        before = path.read_bytes()
        write_epochs(writer, 1)

    assert path.read_bytes().startswith(before)
    assert names(tmp_path) == ["rows-00000.jsonl", "rows-00001.jsonl"]
    assert b'"rule":"compaction"' in (tmp_path / "telemetry" / "rows-00001.jsonl").read_bytes()
