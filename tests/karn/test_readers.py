"""Readers beside a writer that appends lines and converts them: nobody disturbs anybody."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from esper.karn.run import read_rows
from esper.leyline.events import DecisionRow
from esper.nissa import writer as writer_module
from esper.nissa.writer import RunWriter
from tests.karn import fake_run

ROOT = Path(__file__).parents[2]
READ_FOR_EVER = """
import sys
from esper.karn.run import open_run
from esper.leyline.events import DecisionRow

kept, seen, looks = open_run(sys.argv[1]), 0, 0
while kept.state == "running":
    run = kept if looks % 2 else open_run(sys.argv[1])
    ((count, least, most, different),) = run.sql(
        "SELECT count(*), min(epoch), max(epoch), count(DISTINCT epoch) FROM decision"
    ).fetchall()
    assert count == different, (count, different)
    assert count == 0 or (least, most) == (0, count - 1), (count, least, most)
    assert count >= seen, (count, seen)
    last = run.rows(DecisionRow, "epoch >= ?", [count - 10])
    assert [row.epoch for row in last[:10]] == list(range(max(count - 10, 0), count)), (count, len(last))
    seen, looks = count, looks + 1
print(looks)
"""


@pytest.mark.slow
def test_two_readers_in_a_loop_and_a_writer_do_not_disturb_each_other(tmp_path, monkeypatch, capsys):
    """Lines are converted every twenty rows: some hundred times on the way."""
    monkeypatch.setattr(writer_module, "LINES_BYTES", 10_000)
    with RunWriter(tmp_path) as writer:
        readers = [
            subprocess.Popen(
                [sys.executable, "-c", READ_FOR_EVER, str(tmp_path)],
                env={"PYTHONPATH": str(ROOT / "src")},
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        rows = 0
        for _ in range(120):
            for _ in range(20):
                writer.emit(fake_run.policy_decision_row(rows))
                rows += 1
            writer.flush()
            time.sleep(0.02)
    looks = [int(reader.communicate(timeout=60)[0]) for reader in readers]

    assert [reader.returncode for reader in readers] == [0, 0]
    assert min(looks) >= 3
    assert capsys.readouterr().err == ""
    assert [row.epoch for row in read_rows(tmp_path, DecisionRow)] == list(range(rows))
    assert len(list((tmp_path / "telemetry").glob("*/decision.parquet"))) > 20
