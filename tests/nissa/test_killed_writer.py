"""Telemetry writers killed by SIGKILL: every flushed row can be read exactly once."""

import random
from pathlib import Path

import pytest

from esper.karn.run import read_rows
from esper.leyline.rows import DecisionRow
from tests.nissa.endless_writer import BATCH, MOMENTS, Writer


def assert_rows_are_there_once(run: Path, flushed: int) -> None:
    found = [row.epoch for row in read_rows(run, DecisionRow)]
    assert found == list(range(len(found)))
    assert flushed <= len(found) <= flushed + BATCH


@pytest.mark.parametrize("kind", ["write", "resume"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_writer_killed_during_compaction_loses_no_row_and_a_resumed_writer_compacts_the_rest(
    tmp_path, kind, moment
):
    run = tmp_path / "run"
    flushed = Writer(kind, run, moment).last_output()

    assert flushed > 0
    assert_rows_are_there_once(run, flushed)
    if kind == "write":
        return
    resumed = Writer("resume", run)
    while resumed.output.recv() < 3000:
        pass
    resumed.kill_after(0.0)
    files = sorted(path.name for path in (run / "telemetry").glob("rows-*"))
    assert files[:2] in (["rows-00000-00000", f"rows-00001-{last}"] for last in ("00005", "00010"))
    assert not {"rows-00001.jsonl", "rows-00005.jsonl"} & set(files)
    found = [row.epoch for row in read_rows(run, DecisionRow)]
    assert found == list(range(len(found)))
    assert len(found) >= 3000


@pytest.mark.parametrize("kind", ["write", "resume"])
def test_telemetry_writer_killed_at_any_time_loses_no_flushed_row(tmp_path, kind):
    """A writer of kind "resume" continues with the files of the killed writer."""
    stream = random.Random(kind)
    for number in range(12):
        run = tmp_path / (str(number) if kind == "write" else "run")
        assert_rows_are_there_once(run, Writer(kind, run).kill_after(stream.uniform(0, 0.1)))
