from pathlib import Path
from shutil import copytree
from time import process_time

import pytest

from esper.karn.run import open_run
from esper.karn.runs import ListedRun, as_json, find_runs, listed, run_status
from esper.leyline.errors import EsperError
from esper.nissa.writer import RunWriter
from tests.karn import fake_run
from tests.karn.serving import write_run


def make_episode(directory: Path, *, epochs: int = fake_run.EPOCHS) -> None:
    rows = [row for row in fake_run.episode() if row.epoch <= epochs]
    write_run(directory, rows, episodes=2)


def test_runs_are_found_in_nested_folders_but_not_inside_other_runs(tmp_path):
    for name in ("b", "a/heuristic", "a/off"):
        RunWriter(tmp_path / name).close()
    (tmp_path / "b" / "checkpoints" / "telemetry").mkdir(parents=True)
    (tmp_path / "notes").mkdir()

    found = [str(path.relative_to(tmp_path)) for path in find_runs(tmp_path)]

    assert found == ["a/heuristic", "a/off", "b"]
    assert list(find_runs(tmp_path / "b")) == [tmp_path / "b"]


def test_listing_runs_of_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(
        EsperError, match=r"there is no folder '.*nowhere'; name the one that holds your runs"
    ):
        list(find_runs(tmp_path / "nowhere"))


def test_finished_run_is_listed_with_its_score_and_parameters(tmp_path):
    make_episode(tmp_path)

    found = listed(tmp_path)

    assert (found.path, found.state, found.problem) == (str(tmp_path), "stopped", None)
    assert found.run_status == run_status(open_run(tmp_path))
    assert (found.run_status.score, found.run_status.twin, found.run_status.params) == (61.5, 22.0, 398.0)
    machine = as_json(found)
    assert (machine["unit"], machine["done"], machine["total"]) == ("epoch", 8, 16)
    assert (machine["score"], machine["twin"], machine["params"]) == (61.5, 22.0, 398.0)


def test_unfinished_run_is_listed_with_the_score_of_its_last_epoch(tmp_path):
    """Expect score 30 and 250 + 148 + 1200 parameters (host and two seeds) after epoch 3."""
    make_episode(tmp_path, epochs=3)

    found = listed(tmp_path).run_status

    assert (found.score, found.params) == (30.0, 1598.0)
    assert (found.progress.unit, found.progress.done, found.progress.total) == ("epoch", 3, 16)


def test_run_without_run_row_is_listed_with_its_state_but_without_scores(tmp_path):
    with RunWriter(tmp_path):
        assert listed(tmp_path) == ListedRun(str(tmp_path), "running")
    assert listed(tmp_path) == ListedRun(str(tmp_path), "stopped")


def test_damaged_run_is_listed_with_the_reason_why_it_cannot_be_read(tmp_path):
    make_episode(tmp_path)
    (tmp_path / "telemetry" / "rows-00000.jsonl").write_bytes(b'{"table":"run","t":1.0}\n')

    found = listed(tmp_path)

    assert as_json(found) == {"path": str(tmp_path), "state": "damaged", "problem": found.problem}
    assert "rows-00000.jsonl, line 1, is not a row of table 'run': Object missing" in found.problem


def test_finished_runs_are_listed_in_less_than_10_milliseconds_each(tmp_path):
    make_episode(tmp_path / "0")
    for number in range(1, 50):
        copytree(tmp_path / "0", tmp_path / str(number))
    listed(tmp_path / "0")
    began = process_time()
    found = [listed(path) for path in find_runs(tmp_path)]
    seconds = process_time() - began
    assert len(found) == 50
    assert seconds < 50 * 0.01, "CPU seconds; usually 0.05"
