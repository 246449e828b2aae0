import io
from pathlib import Path

import pytest
from rich.console import Console

from esper.karn.questions.progress import Progress, progress
from esper.karn.run import open_run
from esper.karn.runs import Overview, as_json, find_runs, overview, table_of
from esper.leyline.errors import EsperError
from esper.nissa.writer import RunWriter
from tests.karn import fake_run


def make_episode(directory: Path, *, epochs: int = fake_run.EPOCHS) -> None:
    with RunWriter(directory) as writer:
        writer.emit(fake_run.run_row(episodes=2))
        for row in fake_run.episode():
            if getattr(row, "epoch", 0) <= epochs and not (epochs < 8 and type(row).__name__ == "EpisodeRow"):
                writer.emit(row)


def reached(total: int | None) -> Progress:
    return Progress("c", "digits", "ppo", "running", "iteration", 3, total, 30.0, None, 8.0)


def make_training(directory: Path) -> None:
    """Three iterations, the second one with the best score, the last one without any."""
    with RunWriter(directory) as writer:
        writer.emit(fake_run.run_row(controller="ppo", iterations=3))
        for number, score in ((1, 40.0), (2, 61.04), (3, None)):
            row = fake_run.update_row(number)
            row.val_score, row.params = score, 800.0 + number
            writer.emit(row)


def test_runs_are_found_at_any_depth_and_not_within_each_other(tmp_path):
    for name in ("b", "a/heuristic", "a/off"):
        RunWriter(tmp_path / name).close()
    (tmp_path / "b" / "checkpoints" / "telemetry").mkdir(parents=True)
    (tmp_path / "notes").mkdir()

    found = [str(path.relative_to(tmp_path)) for path in find_runs(tmp_path)]

    assert found == ["a/heuristic", "a/off", "b"]
    assert list(find_runs(tmp_path / "b")) == [tmp_path / "b"]


def test_a_missing_folder_is_a_sentence(tmp_path):
    with pytest.raises(
        EsperError, match=r"there is no folder '.*nowhere'; name the one that holds your runs"
    ):
        list(find_runs(tmp_path / "nowhere"))


def test_a_run_is_seen_by_its_episodes(tmp_path):
    make_episode(tmp_path)

    assert overview(tmp_path) == Overview(
        path=str(tmp_path),
        state="stopped",
        task="digits_impaired",
        controller="heuristic",
        rng_seed=0,
        started="2030-01-01T00:00:00Z",
        progress=progress(open_run(tmp_path)),
        best_score=61.5,
        last_score=61.5,
        params=398.0,
    )


def test_a_run_in_its_first_episode_is_seen_by_its_epochs(tmp_path):
    """Scores on the way: 10, 14, 22.5, 30; after epoch 3 the host of 250 has seeds of 148 and 1200."""
    make_episode(tmp_path, epochs=3)

    found = overview(tmp_path)

    assert (found.best_score, found.last_score, found.params) == (30.0, 30.0, 1598.0)
    assert found.progress is not None
    assert (found.progress.unit, found.progress.done, found.progress.total) == ("epoch", 3, 16)


def test_a_training_is_seen_by_its_iterations_and_unknown_scores_are_passed_over(tmp_path):
    make_training(tmp_path)

    found = overview(tmp_path)

    assert found.progress is not None
    assert (found.state, found.progress.done, found.progress.total) == ("finished", 3, 3)
    assert (found.best_score, found.last_score, found.params) == (61.04, 61.04, 803.0)


def test_a_run_without_its_own_row_is_listed_with_what_is_known(tmp_path):
    with RunWriter(tmp_path):
        assert overview(tmp_path) == Overview(str(tmp_path), "running")
    assert overview(tmp_path) == Overview(str(tmp_path), "stopped")


def test_a_damaged_run_says_why(tmp_path):
    make_episode(tmp_path)
    part = tmp_path / "telemetry" / "run" / "part-00000.jsonl"
    part.write_bytes(b"{}\n")

    found = overview(tmp_path)

    assert found.state == "damaged"
    assert found.problem is not None
    assert (
        "part-00000.jsonl, line 1, is not a row of this table: Object missing required field" in found.problem
    )


def test_the_list_shows_unknown_as_a_dash():
    overviews = [
        Overview("runs/a", "damaged", problem="a part is gone"),
        Overview(
            "runs/b", "finished", None, "digits", "ppo", 7, "2030-01-01T12:34:56Z", None, 61.04, 0.0, 1234.6
        ),
        Overview("runs/c", "running", progress=reached(None)),
    ]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table_of(overviews))

    _, _, a, b, c = (line.split() for line in console.export_text().splitlines())
    assert a == ["runs/a", *"–––––––", "damaged", "–"]
    assert b == [
        "runs/b",
        "digits",
        "ppo",
        "7",
        "61.0",
        "0.0",
        "1,235",
        "–",
        "finished",
        "2030-01-01",
        "12:34",
    ]
    assert c == ["runs/c", *"––––––", "iteration", "3", "running", "–"]


def test_machines_get_the_same_without_dashes():
    found = as_json(Overview("runs/c", "running", task="digits", progress=reached(9)))

    assert (found["unit"], found["done"], found["planned"]) == ("iteration", 3, 9)
    assert (found["task"], found["best_score"], found["problem"]) == ("digits", None, None)
