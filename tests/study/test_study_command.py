"""Studies with ``esper study`` that are interrupted, killed, resumed or refused."""

import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import msgspec
import polars
import pytest

from esper.scripts import cli
from esper.scripts.guard import INTERRUPTED
from esper.study.study_journal import FOLDER, LINES_FILE, decoded_line
from tests.integration.training import forked, sentence_of

SMOKE = Path(__file__).parents[2] / "examples" / "smoke_study.toml"
RUNS = 40
"""Number of runs in the smoke study. On each of two tasks two sizes, a clock and a plan are run with two
learning rates and one selection rng seed (8 runs); with two rng seeds both sizes are run with two learning
rates (8), clock and plan with the selected rate (4).
"""
SECONDS = 600
"""Timeout of a study in seconds; the whole study takes ten seconds."""


def run_here(file: Path, out: Path, said: Path) -> None:
    """Run ``esper study`` in the child process, with all its runs in that process."""
    sys.stderr = said.open("w")
    cli.main(["study", str(file), "--out", str(out), "--processes", "1"])


def untimed(path: Path) -> str:
    """Return the text of a result file without its CPU times."""
    found, times = re.subn(r"[0-9.]+ s\b", "", path.read_text())
    assert times >= 10
    return found


def stopped(out: Path, lines: int, number: signal.Signals) -> tuple[int, str]:
    """Start a study, send it a signal after some finished runs, and return its exit code and output."""
    said = out.parent / "said"
    child = forked(run_here, SMOKE, out, said)
    journal, limit = out / FOLDER / LINES_FILE, time.monotonic() + SECONDS
    while not journal.exists() or journal.read_bytes().count(b"\n") < lines:
        assert child.is_alive(), said.read_text()
        assert time.monotonic() < limit
        time.sleep(0.01)
    os.kill(child.pid, number)
    child.join(SECONDS)
    return child.exitcode, said.read_text()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "smoke"
    cli.main(["study", str(SMOKE), "--out", str(out), "--processes", "1"])
    return out


def test_a_study_resumed_after_interrupt_and_kill_gives_the_same_table(undisturbed, tmp_path, capsys):
    out = tmp_path / "smoke"
    journal = out / FOLDER / LINES_FILE
    code, said = stopped(out, 2, signal.SIGINT)
    assert code == INTERRUPTED
    assert f"to go on with the rest: esper study {SMOKE} --out {out}" in said
    code, said = stopped(out, 6, signal.SIGKILL)
    assert code == -signal.SIGKILL
    done = journal.read_bytes()
    # The killed process left an incomplete last line in the study's journal file.
    journal.write_bytes(done + b'{"run":{"task":"teacher_sca')
    cli.main(["study", str(SMOKE), "--out", str(out), "--processes", "1"])
    lines = journal.read_bytes()
    assert lines.startswith(done)
    assert lines.count(b"\n") == RUNS
    for name in ("table.md", "study.html"):
        assert untimed(out / name) == untimed(undisturbed / name)


def test_a_finished_study_is_printed_without_new_runs(undisturbed, capsys):
    began = time.process_time()
    cli.main(["study", str(SMOKE), "--out", str(undisturbed), "--processes", "1"])
    shown = capsys.readouterr()
    assert (undisturbed / "table.md").read_text() in shown.out
    assert shown.err == ""
    assert time.process_time() - began < 60


def test_parquet_file_of_a_study_has_a_row_per_arm_rng_seed_and_budget_mark(undisturbed):
    rows = polars.read_parquet(undisturbed / "answers.parquet")
    # The Parquet file has one row for each combination of two tasks, seven arms, two rng seeds and three
    # budget marks.
    assert rows.height == 2 * 7 * 2 * 3
    assert rows["arm"].unique(maintain_order=True).to_list() == [
        "static:1", "static:2", "clock", "grown", "grown, from scratch", "halving", "extrapolated",
    ]  # fmt: skip
    # A minibatch of two blocks costs at most 7 MFLOP.
    known = rows.filter(rows["charged"].is_not_null())
    assert all(abs(charged - mark * 400e6) < 7e6 for mark, charged in known.select("mark", "charged").rows())
    unknown = rows.filter(rows["charged"].is_null()).select("arm", "mark").unique().rows()
    assert set(unknown) == {(arm, mark) for arm in ("extrapolated", "halving") for mark in (0.1, 0.3)}
    trained = ~rows["arm"].is_in(["halving", "extrapolated"])
    assert rows.filter(trained)["seconds"].min() > 0
    assert rows.filter(~trained)["seconds"].null_count() == 24


def test_another_study_in_the_same_folder_is_refused_and_the_differences_are_printed(
    undisturbed, tmp_path, capsys
):
    other = tmp_path / "other.toml"
    other.write_text(
        SMOKE.read_text().replace('"400M"', '"500M"').replace("rng_seeds = 2", "rng_seeds = 3", 1)
    )
    sentence = sentence_of(capsys, "study", other, "--out", undisturbed)
    assert f"'{undisturbed}' holds the study of '{SMOKE}', from which '{other}' differs in" in sentence
    assert "differs in budget, rng_seeds; go on with the file as it was, or choose another --out" in sentence


def test_journal_of_version_0_1_whose_lines_have_no_checksum_is_continued(undisturbed, tmp_path):
    out = tmp_path / "smoke"
    shutil.copytree(undisturbed, out)
    journal = out / FOLDER / LINES_FILE
    results = [decoded_line(line) for line in journal.read_bytes().splitlines()]
    journal.write_bytes(b"".join(msgspec.json.encode(result) + b"\n" for result in results))
    cli.main(["study", str(SMOKE), "--out", str(out), "--processes", "1"])
    assert journal.read_bytes().count(b"\n") == len(results) == RUNS
    assert (out / "table.md").read_bytes() == (undisturbed / "table.md").read_bytes()


def test_a_study_file_with_a_new_comment_is_the_same_study(undisturbed, tmp_path):
    other = tmp_path / "other.toml"
    other.write_text("# the same\n" + SMOKE.read_text())
    cli.main(["study", str(other), "--out", str(undisturbed), "--processes", "1"])


@pytest.mark.parametrize(
    "damage",
    [lambda line: line[:-5], lambda line: re.sub(rb'"val_loss":[0-9]', b'"val_loss":7', line, count=1)],
)
def test_study_with_a_damaged_journal_line_is_refused_with_the_line_number(
    damage, undisturbed, tmp_path, capsys
):
    journal = undisturbed / FOLDER / LINES_FILE
    whole = journal.read_bytes()
    first, _, rest = whole.partition(b"\n")
    assert damage(first) != first
    journal.write_bytes(damage(first) + b"\n" + rest)
    assert f"line 1 of '{journal}' is damaged" in sentence_of(capsys, "study", SMOKE, "--out", undisturbed)
    journal.write_bytes(whole)
