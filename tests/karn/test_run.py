import os
import re
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest
from msgspec.structs import replace

import esper
from esper.files.row_files import RowFiles, RowMark
from esper.karn import stored_rows
from esper.karn.run import open_run, read_rows
from esper.karn.runs import listed
from esper.leyline import HEAD_NAMES
from esper.leyline.columns import COLUMNS
from esper.leyline.errors import EsperError, UnknownNameError
from esper.leyline.rows import TABLES, DecisionRow, EpochRow, Row, RunRow
from esper.nissa import compaction
from esper.nissa import writer as writer_module
from esper.nissa.writer import RunWriter
from tests.karn import fake_run, made_run
from tests.karn.serving import write_run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path) -> Path:
    """Return the directory of a finished run with one episode and one decision of a policy."""
    return write_run(tmp_path / "run", [*fake_run.episode(), fake_run.policy_decision_row(8)])


def compact(run: Path) -> None:
    compaction.compact(run / "telemetry", last=0)


# --- rows and tables --------------------------------------------------------------------------------


def test_telemetry_rows_selected_by_an_sql_condition_are_returned_oldest_first(run):
    found = open_run(run).rows(EpochRow, "epoch >= ? AND val_score < ?", [3, 60.0])

    assert [row.epoch for row in found] == [3, 4, 5, 6]
    assert found[0] == open_run(run).rows(EpochRow)[3]
    found = open_run(str(run)).rows(EpochRow, "epoch = (SELECT max(epoch) FROM seed WHERE slot = 1)")
    assert [row.epoch for row in found] == [4]
    with pytest.raises(EsperError, match=r"the rows of 'epoch' cannot be read: Binder Error: .*\"speed\""):
        open_run(run).rows(EpochRow, "speed > 3")


def test_telemetry_tables_have_all_columns_and_types_even_if_empty(tmp_path):
    RunWriter(tmp_path / "empty").close()
    for name in ("lines", "parquet"):
        made_run.write(tmp_path / name, fake_run.one_row_of_each_table().values())
    compact(tmp_path / "parquet")

    for name in ("empty", "lines", "parquet"):
        run = open_run(tmp_path / name)
        for table in TABLES:
            relation = run.table(table)
            assert list(zip(relation.columns, map(str, relation.types), strict=True)) == [
                (column.name, column.sql_type) for column in COLUMNS[table]
            ]


def test_result_of_an_sql_query_stays_valid_after_later_queries_and_after_the_run_object_is_deleted(run):
    found = open_run(run)
    relation = found.sql("SELECT count(*) AS n, max(params) FROM epoch WHERE epoch > ?", [1])
    found.sql("SELECT * FROM decisions").fetchall()
    compact(run)
    found.sql("SELECT * FROM epoch").fetchall()
    del found

    assert (relation.columns[0], relation.fetchall()) == ("n", [(7, 250 + 148 + 1200)])


@pytest.mark.parametrize(("library", "method"), [("pandas", "df"), ("polars", "pl")])
def test_result_of_an_sql_query_converts_to_pandas_and_polars(run, library, method):
    frames = pytest.importorskip(library)

    table = getattr(open_run(run).table("epoch"), method)()

    assert isinstance(table, frames.DataFrame)
    assert list(table["val_score"]) == [row.val_score for row in read_rows(run, EpochRow)]


def test_error_for_an_unknown_telemetry_table_suggests_the_nearest_table_name(run):
    with pytest.raises(UnknownNameError, match="unknown table 'epochs'; did you mean epoch"):
        open_run(run).table("epochs")
    with pytest.raises(UnknownNameError, match="unknown row type 'Row'"):
        open_run(run).rows(Row)


@pytest.mark.parametrize(("query", "count"), [("SELECT 1; SELECT 2", 2), ("", 0), ("-- nothing", 0)])
def test_sql_query_of_several_statements_is_refused(run, query, count):
    with pytest.raises(EsperError, match=f"one statement is allowed; found {count}"):
        open_run(run).sql(query)


def test_sql_show_tables_lists_exactly_the_telemetry_tables(run):
    names = {name for (name,) in open_run(run).sql("SHOW TABLES").fetchall()}

    assert names == {*TABLES, "decisions"}


@pytest.mark.parametrize("name", ["it's", "a[1]", "what?*", "sp ace"])
def test_run_directory_name_may_contain_quotes(tmp_path, name):
    for kind in ("lines", "parquet"):
        made_run.write(tmp_path / name / kind, [fake_run.epoch_row(3)])
    compact(tmp_path / name / "parquet")

    for kind in ("lines", "parquet"):
        assert [row.epoch for row in open_run(tmp_path / name / kind).rows(EpochRow)] == [3]


# --- view decisions ---------------------------------------------------------------------------------


def test_sql_view_decisions_has_names_of_op_slot_and_blueprint_from_the_run_row(run):
    """Check a GERMINATE action, which uses six action heads; the columns of the last two heads are null."""
    relation = open_run(run).sql("SELECT * FROM decisions WHERE op_probability IS NOT NULL")
    found = dict(zip(relation.columns, relation.fetchall()[0], strict=True))

    assert {head: found[head] for head in HEAD_NAMES} == {
        "op": "GERMINATE",
        "slot": "r0c1",
        "blueprint": "conv_light",
        "style": "sigmoid_add",
        "tempo": "slow",
        "alpha_target": "seventy",
        "alpha_speed": None,
        "alpha_curve": None,
    }
    assert found["op_probability"] == 0.625
    assert (found["succeeded"], found["forced"], found["value"]) == (True, False, 0.3)
    assert [found[f"{head}_masked"] for head in HEAD_NAMES] == [True, False, True] + [False] * 5


def test_sql_view_decisions_uses_the_order_of_action_heads_in_the_run_row(tmp_path):
    """Use a run row with two action heads, in the order slot, op."""
    names = {"heads": ["slot", "op"], "head_choices": [["left", "right"], ["STAY", "GO"]]}
    row = replace(fake_run.run_row(), **names)
    chosen = {"action": [1, 0], "read": [True, True], "masked": [False, True], "op_probs": [0.75, 0.25]}
    decision = replace(fake_run.policy_decision_row(0), **chosen)
    made_run.write(tmp_path, [row, decision])

    query = "SELECT op, slot, blueprint, op_masked, slot_masked, op_probability FROM decisions"
    assert open_run(tmp_path).sql(query).fetchall() == [("STAY", "right", None, True, False, 0.75)]


def test_sql_view_decisions_has_null_names_if_the_run_row_is_missing(tmp_path):
    made_run.write(tmp_path, [fake_run.policy_decision_row(0)])

    assert open_run(tmp_path).sql("SELECT epoch, op, succeeded FROM decisions").fetchall() == [
        (0, None, True)
    ]


# --- concurrent writer ------------------------------------------------------------------------------


def test_every_query_of_an_open_run_sees_newly_flushed_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "LINES_BYTES", 500)
    with RunWriter(tmp_path) as writer:
        found = open_run(tmp_path)
        for epoch in range(12):
            writer.emit(replace(fake_run.epoch_row(1), epoch=epoch))
            assert [row.epoch for row in found.rows(EpochRow)] == list(range(epoch))
            writer.flush()
            assert found.sql("SELECT count(*), max(epoch) FROM epoch").fetchall() == [(epoch + 1, epoch)]
    assert len(list((tmp_path / "telemetry").glob("*/epoch.parquet"))) == 6


@pytest.mark.parametrize("file_stamps", ["real", "equal"])
def test_run_object_does_not_return_rows_that_were_removed_when_the_run_was_resumed(
    file_stamps, tmp_path, monkeypatch
):
    """Files with equal inodes, sizes and times are distinguished by the signature of the resumed writer."""
    if file_stamps == "equal":
        monkeypatch.setattr(stored_rows, "stamp_of", lambda status: ())

    def write(writer, iteration, epoch):
        with writer.iteration(iteration):
            writer.emit(fake_run.epoch_row(epoch))

    with RunWriter(tmp_path) as writer:
        write(writer, 0, 0)
        write(writer, 1, 1)
    found = open_run(tmp_path)
    assert [row.epoch for row in found.rows(EpochRow)] == [0, 1]

    with RunWriter(tmp_path, resume_from=RowMark(0, 0.0)) as writer:
        assert [row.epoch for row in found.rows(EpochRow)] == [0]
        write(writer, 1, 3)
        assert [row.epoch for row in found.rows(EpochRow)] == [0, 3]


def test_json_lines_compacted_between_listing_and_reading_are_read_as_parquet(run, monkeypatch):
    listed = stored_rows.row_files

    def too_late(telemetry: Path) -> RowFiles:
        files = listed(telemetry)
        compact(run)
        return files

    monkeypatch.setattr(stored_rows, "row_files", too_late)

    assert [row.epoch for row in open_run(run).rows(EpochRow)] == list(range(9))


# --- state ------------------------------------------------------------------------------------------


def test_run_without_writer_process_and_without_all_planned_episodes_has_state_stopped(run, tmp_path):
    with RunWriter(tmp_path / "half") as writer:
        writer.emit(fake_run.run_row(episodes=2))
        writer.emit(fake_run.episode_row(0))
        writer.flush()
        assert open_run(tmp_path / "half").state == "running"

    assert open_run(tmp_path / "half").state == "stopped"
    assert open_run(run).state == "finished"


@pytest.mark.parametrize(("iterations", "state"), [(2, "finished"), (3, "stopped")])
def test_policy_training_has_state_finished_after_its_last_iteration(tmp_path, iterations, state):
    rows = [fake_run.run_row(iterations=iterations), fake_run.update_row(1), fake_run.update_row(2)]
    made_run.write(tmp_path, rows)

    assert open_run(tmp_path).state == state


def test_run_killed_before_its_run_row_was_written_has_state_stopped(tmp_path):
    RunWriter(tmp_path).close()

    assert open_run(tmp_path).state == "stopped"
    with pytest.raises(EsperError, match="has not written its own row yet"):
        _ = open_run(tmp_path).row


# --- not a run --------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_parquet", [False, True])
def test_open_run_refuses_an_older_telemetry_schema_and_names_its_version(tmp_path, as_parquet):
    made_run.write(tmp_path, [replace(fake_run.run_row(), schema_version=3)])
    lines = tmp_path / "telemetry" / "rows-00000.jsonl"
    lines.write_bytes(re.sub(rb'"metric":"\w+",', b"", lines.read_bytes()))
    if as_parquet:
        folder = lines.with_name("rows-00000-00000")
        folder.mkdir()
        duckdb.sql("SELECT 3 AS schema_version, 'made' AS name").write_parquet(f"{folder}/run.parquet")
        lines.unlink()

    with pytest.raises(EsperError, match="was written with version 3 of the tables"):
        open_run(tmp_path).rows(RunRow)


def test_open_run_refuses_the_old_layout_with_a_folder_per_telemetry_table():
    old = ROOT / "tests" / "old_run"

    with pytest.raises(EsperError, match="was written with version 2 of the tables; this version of esper"):
        open_run(old).rows(RunRow)
    assert listed(old).state == "damaged"


def test_open_run_does_not_import_torch():
    code = "import esper, sys; esper.open_run; assert 'torch' not in sys.modules"

    subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, check=True
    )
    assert esper.open_run is open_run


def test_reading_a_run_writes_no_files(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    found = open_run(run)
    found.rows(DecisionRow)
    found.sql("SELECT * FROM decisions ORDER BY t").fetchall()

    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
