import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from esper.karn.query import read_rows
from esper.leyline.errors import EsperError
from esper.leyline.events import TABLES, EpochRow, ResourceRow, Row, UpdateRow
from esper.nissa.encoding import RowError
from esper.nissa.writer import RunWriter
from tests.karn import fake_run


def file_of(run: Path, table: str) -> Path:
    return run / "telemetry" / table / "part-00000.jsonl"


@pytest.mark.parametrize("table", TABLES)
def test_a_row_of_every_table_is_read_back_as_it_was(tmp_path, table):
    row = fake_run.one_row_of_each_table()[table]
    with RunWriter(tmp_path / "run") as writer:
        writer.emit(row)

    assert read_rows(tmp_path / "run", table)[0] == row


def test_the_files_are_json_lines_under_the_name_of_their_table(tmp_path):
    with RunWriter(tmp_path) as writer:
        writer.emit(fake_run.epoch_row(1))
        writer.emit(fake_run.epoch_row(2))

    lines = file_of(tmp_path, "epoch").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2]


def test_a_resumed_writer_cuts_off_what_came_after_the_stored_sizes(tmp_path):
    with RunWriter(tmp_path, resumable=True) as writer:
        writer.emit(fake_run.update_row(1))
        writer.flush()
        with writer.checkpoint() as sizes:
            pass
        writer.emit(fake_run.update_row(2))
    with RunWriter(tmp_path, resume_from=sizes) as writer:
        writer.emit(fake_run.update_row(7))

    assert [row.iteration for row in read_rows(tmp_path, UpdateRow)] == [1, 7]


def test_a_resumed_run_goes_on_in_its_own_time(tmp_path):
    with RunWriter(tmp_path, resumable=True, clock=iter([100.0, *[130.0] * 20]).__next__) as writer:
        writer.emit(fake_run.update_row(1))
        writer.flush()
        with writer.checkpoint() as sizes:
            pass
        writer.emit(fake_run.update_row(2))
    with RunWriter(tmp_path, resume_from=sizes, clock=iter([7.0, *[9.5] * 20]).__next__) as writer:
        writer.emit(fake_run.update_row(2))

    assert [row.t for row in read_rows(tmp_path, UpdateRow)] == [30.0, 32.5]


def test_rows_reach_the_disk_at_flush_and_not_before(tmp_path):
    writer = RunWriter(tmp_path)
    writer.emit(fake_run.epoch_row(1))
    assert not file_of(tmp_path, "epoch").exists()

    writer.flush()
    assert len(read_rows(tmp_path, "epoch")) == 1
    writer.close()


def test_rows_are_stamped_with_the_seconds_since_the_run_began(tmp_path):
    now = 100.0
    writer = RunWriter(tmp_path, clock=lambda: now)
    now = 101.5
    writer.emit(fake_run.epoch_row(1))
    now = 104.0
    writer.emit(fake_run.epoch_row(2))
    writer.close()

    assert [row.t for row in read_rows(tmp_path, EpochRow)] == [1.5, 4.0]


def test_a_resource_row_is_written_about_every_ten_seconds_and_at_the_end(tmp_path):
    # Flushes every 4 s: 12 is the first at or after 10, 24 the first at or after 22; the end is at 24.
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


def test_numbers_out_of_arrays_are_written_like_others(tmp_path):
    row = fake_run.epoch_row(1)
    row.val_score, row.params, row.ms = np.float32(12.5), np.int64(7), np.float64(0.5)
    with RunWriter(tmp_path) as writer:
        writer.emit(row)

    found = read_rows(tmp_path, EpochRow)[0]
    assert (found.val_score, found.params, found.ms) == (12.5, 7, 0.5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan")])
@pytest.mark.parametrize("column", ["val_loss", "twin_score"])
def test_a_number_that_is_not_finite_is_refused_by_table_and_column(tmp_path, column, value):
    row = fake_run.epoch_row(1)
    setattr(row, column, value)
    with RunWriter(tmp_path) as writer:
        with pytest.raises(RowError, match=f"column '{column}' of table 'epoch' is -?(nan|inf)"):
            writer.emit(row)
        writer.emit(fake_run.epoch_row(2))

    assert [row.epoch for row in read_rows(tmp_path, EpochRow)] == [2]


def test_a_number_that_is_not_finite_is_found_inside_a_map(tmp_path):
    row = fake_run.run_row()
    row.config = {"optimiser": {"clip": [1.0, math.inf]}}
    with (
        RunWriter(tmp_path) as writer,
        pytest.raises(RowError, match="column 'config' of table 'run' is inf"),
    ):
        writer.emit(row)


@pytest.mark.parametrize("value", [math.nan, math.inf, np.float32("inf"), np.float64("nan")])
@pytest.mark.parametrize("column", ["log_probs", "op_probs", "reward_terms"])
def test_a_number_that_is_not_finite_is_found_among_numbers(tmp_path, column, value):
    row = fake_run.policy_decision_row(1)
    setattr(row, column, {"lead": 0.5, "rent": value} if column == "reward_terms" else [None, 0.0, value])
    with RunWriter(tmp_path) as writer:
        with pytest.raises(RowError, match=f"column '{column}' of table 'decision' is (nan|inf)"):
            writer.emit(row)
        writer.emit(fake_run.policy_decision_row(2))

    assert len(read_rows(tmp_path, "decision")) == 1


def test_a_value_that_json_does_not_know_is_refused_and_leaves_no_trace(tmp_path):
    row = fake_run.run_row()
    row.config = {"path": tmp_path}
    with RunWriter(tmp_path) as writer:
        with pytest.raises(RowError, match="a row of table 'run' cannot be written: PosixPath"):
            writer.emit(row)
        writer.emit(fake_run.run_row())

    assert len(read_rows(tmp_path, "run")) == 1


def test_a_row_of_no_table_is_refused(tmp_path):
    class Stray(Row, kw_only=True):
        pass

    with RunWriter(tmp_path) as writer, pytest.raises(RowError, match="Stray belongs to no table"):
        writer.emit(Stray())


def test_a_closed_writer_takes_no_rows_and_may_be_closed_again(tmp_path):
    writer = RunWriter(tmp_path)
    writer.close()
    writer.close()

    with pytest.raises(EsperError, match="is closed"):
        writer.emit(fake_run.epoch_row(1))


WRITE_FOR_EVER = """
import sys
from pathlib import Path
from esper.nissa.writer import RunWriter
from tests.karn import fake_run

writer = RunWriter(Path(sys.argv[1]))
for epoch in range(10**9):
    row = fake_run.epoch_row(1)
    row.epoch = epoch
    writer.emit(row)
    writer.flush()
    print(epoch, flush=True)
"""


def test_a_killed_process_loses_at_most_the_epoch_in_progress(tmp_path):
    root = Path(__file__).parents[2]
    run = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", WRITE_FOR_EVER, str(run)],
        cwd=root,
        env={"PYTHONPATH": f"{root / 'src'}:{root}"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        flushed = -1
        while flushed < 200:
            flushed = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        # Lines that were under way when the signal came; the last of them may be torn as well.
        rest = process.stdout.read().split("\n")[:-1]
    flushed = int(rest[-1]) if rest else flushed

    epochs = [row.epoch for row in read_rows(run, EpochRow)]
    assert epochs == list(range(len(epochs)))
    assert len(epochs) in (flushed + 1, flushed + 2)
