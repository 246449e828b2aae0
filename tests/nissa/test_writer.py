import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from esper.karn.run import read_rows
from esper.leyline.errors import EsperError
from esper.leyline.rows import TABLES, EpochRow, ResourceRow, Row
from esper.nissa.encoding import RowError
from esper.nissa.writer import RunWriter
from tests.karn import fake_run


def file_of(run: Path) -> Path:
    return run / "telemetry" / "rows-00000.jsonl"


def test_telemetry_rows_are_immutable(tmp_path):
    for row in fake_run.one_row_of_each_table().values():
        with pytest.raises(AttributeError, match="immutable"):
            row.t = 1.0


def test_telemetry_file_has_json_lines_that_start_with_the_table_name(tmp_path):
    with RunWriter(tmp_path) as writer:
        writer.emit(fake_run.epoch_row(1))
        writer.emit(fake_run.update_row(2))

    lines = [json.loads(line) for line in file_of(tmp_path).read_text(encoding="utf-8").splitlines()]
    assert [line["table"] for line in lines] == ["epoch", "update", "resource"]
    assert lines[1]["iteration"] == 2


def test_every_telemetry_row_is_written_even_if_each_write_accepts_only_50_bytes(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, content: write(file, content[:50]))
    with RunWriter(tmp_path) as writer:
        writer.emit(fake_run.epoch_row(1))
        writer.emit(fake_run.epoch_row(2))

    assert [row.epoch for row in read_rows(tmp_path, EpochRow)] == [1, 2]


def test_telemetry_rows_have_the_time_since_the_start_and_reach_the_disk_at_flush(tmp_path):
    now = 100.0
    writer = RunWriter(tmp_path, clock=lambda: now)
    now = 101.5
    writer.emit(fake_run.epoch_row(1))
    assert not file_of(tmp_path).exists()

    now = 104.0
    writer.flush()
    assert [row.t for row in read_rows(tmp_path, EpochRow)] == [1.5]
    writer.close()


def test_resource_row_is_written_about_every_ten_seconds_and_at_the_end(tmp_path):
    # With a flush every 4 s, resource rows are written at 12 s and 24 s (at least 10 s apart) and at the end.
    now = 0.0
    writer = RunWriter(tmp_path, clock=lambda: now)
    for epoch in range(1, 7):
        now = 4.0 * epoch
        writer.emit(fake_run.epoch_row(epoch))
        writer.flush()
    writer.close()

    rows = read_rows(tmp_path, ResourceRow)
    assert [row.t for row in rows] == [12.0, 24.0, 24.0]
    assert [row.rows_written for row in rows] == [4, 8, 9]
    assert all(row.rss_mb > 1 for row in rows)


def test_numpy_scalars_in_telemetry_rows_are_written_like_python_numbers(tmp_path):
    numbers = {"val_score": np.float32(12.5), "params": np.int64(7), "ms": np.float64(0.5)}
    row = replace(fake_run.epoch_row(1), **numbers)
    with RunWriter(tmp_path) as writer:
        writer.emit(row)

    found = read_rows(tmp_path, EpochRow)[0]
    assert (found.val_score, found.params, found.ms) == (12.5, 7, 0.5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("inf"), np.float64("nan")])
@pytest.mark.parametrize(
    ("table", "column", "place"),
    [
        ("epoch", "val_loss", lambda value: value),
        ("epoch", "twin_score", lambda value: value),
        ("decision", "log_probs", lambda value: [None, 0.0, value]),
        ("decision", "op_probs", lambda value: [None, 0.0, value]),
        ("decision", "reward_terms", lambda value: {"lead": 0.5, "rent": value}),
        ("run", "config", lambda value: {"optimiser": {"clip": [1.0, value]}}),
    ],
)
def test_error_for_a_non_finite_number_in_a_telemetry_row_names_table_and_column(
    tmp_path, table, column, place, value
):
    row = fake_run.one_row_of_each_table()[table]
    with RunWriter(tmp_path, clock=lambda: row.t) as writer:
        with pytest.raises(RowError, match=f"column '{column}' of table '{table}' is -?(nan|inf)"):
            writer.emit(replace(row, **{column: place(value)}))
        writer.emit(row)

    assert len(read_rows(tmp_path, TABLES[table])) == 1


def test_telemetry_row_with_a_value_without_json_equivalent_is_refused_and_not_written(tmp_path):
    row = replace(fake_run.run_row(), config={"path": tmp_path})
    with RunWriter(tmp_path) as writer:
        with pytest.raises(RowError, match="a row of table 'run' cannot be written: PosixPath"):
            writer.emit(row)
        writer.emit(fake_run.run_row())

    assert len(read_rows(tmp_path, TABLES["run"])) == 1


def test_row_of_a_type_that_belongs_to_no_telemetry_table_is_refused(tmp_path):
    class Stray(Row, kw_only=True):
        pass

    with RunWriter(tmp_path) as writer, pytest.raises(RowError, match="Stray belongs to no table"):
        writer.emit(Stray())


def test_closed_telemetry_writer_refuses_rows_and_may_be_closed_again(tmp_path):
    writer = RunWriter(tmp_path)
    writer.close()
    writer.close()

    with pytest.raises(EsperError, match="is closed"):
        writer.emit(fake_run.epoch_row(1))


@pytest.mark.parametrize(
    ("detail", "missing"),
    [
        ("full", set()),
        ("standard", {"seed", "counterfactual"}),
        ("summary", {"seed", "counterfactual", "epoch", "decision"}),
    ],
)
def test_rows_of_telemetry_tables_outside_the_level_of_detail_are_not_written(tmp_path, detail, missing):
    with RunWriter(tmp_path, detail="full" if missing else "summary") as writer:
        writer.detail = detail
        for row in fake_run.one_row_of_each_table().values():
            writer.emit(row)

    assert {table for table in TABLES if not read_rows(tmp_path, TABLES[table])} == missing
