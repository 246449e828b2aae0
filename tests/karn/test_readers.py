"""Concurrent readers of a run whose writer appends JSON lines and compacts them to Parquet."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from esper.karn.run import open_run, read_rows
from esper.leyline.rows import DecisionRow
from esper.nissa import writer as writer_module
from esper.nissa.writer import RunWriter
from tests.karn import fake_run


def look_on(run_dir: Path, looks: list[int], reader: int) -> None:
    """Read a run until it ends, and count the reads in ``looks``; every other read opens the run again."""
    kept, seen = open_run(run_dir), 0
    while kept.state == "running":
        run = kept if looks[reader] % 2 else open_run(run_dir)
        ((count, least, most, different),) = run.sql(
            "SELECT count(*), min(epoch), max(epoch), count(DISTINCT epoch) FROM decision"
        ).fetchall()
        assert count == different
        assert count == 0 or (least, most) == (0, count - 1)
        assert count >= seen
        # The writer may have written more rows since the query above.
        last = run.rows(DecisionRow, "epoch >= ? AND epoch < ?", [count - 10, count])
        assert [row.epoch for row in last] == list(range(max(count - 10, 0), count))
        seen = count
        looks[reader] += 1


def wait_for_a_look(looks: list[int], readers: list[Future[None]]) -> None:
    """Wait until every reader has finished a read since this call, or one has failed."""
    before = list(looks)
    while any(now == old for now, old in zip(looks, before, strict=True)):
        if any(reader.done() for reader in readers):
            return
        time.sleep(0.01)


@pytest.mark.slow
def test_two_concurrent_readers_see_every_row_once_while_the_writer_compacts(tmp_path, monkeypatch, capsys):
    """Use a writer that compacts its JSON lines to Parquet about every twenty rows."""
    monkeypatch.setattr(writer_module, "LINES_BYTES", 10_000)
    with ThreadPoolExecutor(2) as readers, RunWriter(tmp_path) as writer:
        looks = [0, 0]
        looking = [readers.submit(look_on, tmp_path, looks, reader) for reader in range(2)]
        for row in range(2400):
            writer.emit(fake_run.policy_decision_row(row))
            if row % 20 == 19:
                writer.flush()
                time.sleep(0.02)
            if row % 600 == 599:
                wait_for_a_look(looks, looking)

    for one in looking:
        one.result()
    assert min(looks) >= 4
    assert capsys.readouterr().err == ""
    assert [row.epoch for row in read_rows(tmp_path, DecisionRow)] == list(range(2400))
    assert len(list((tmp_path / "telemetry").glob("*/decision.parquet"))) > 20
