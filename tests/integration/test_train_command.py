"""Teaching a policy as a user meets it: what is left behind, resumed runs, processes, mistakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from esper.karn.query import read_rows
from esper.leyline.events import EpisodeRow, RunRow, UpdateRow
from esper.scripts import cli, train
from esper.tamiyo.policy.checkpoint import load_policy

TINY = ["--envs", "8", "--rounds", "3", "--steps", "3", "--hidden-dim", "16", "--evaluate-lives", "2"]
TINY += ["--evaluate-every", "2", "--checkpoint-every", "1"]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Twins are kept for all tests of this process, and nowhere in a home directory."""
    monkeypatch.setenv("ESPER_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("train") / "run"
    os.environ["ESPER_CACHE"] = str(tmp_path_factory.getbasetemp() / "cache")
    cli.main(["train", *TINY, "--out", str(out)])
    return out


def last_state(run: Path) -> dict[str, torch.Tensor]:
    latest = (run / "checkpoints" / "latest").read_text()
    return load_policy(run / "checkpoints" / latest).state_dict()


def rows_without_times(run: Path) -> list[dict[str, object]]:
    rows = read_rows(run, UpdateRow)
    hidden = {"t", "seconds"}
    return [{f: getattr(row, f) for f in row.__struct_fields__ if f not in hidden} for row in rows]


def assert_same_run(one: Path, other: Path) -> None:
    assert rows_without_times(one) == rows_without_times(other)
    ours, theirs = last_state(one), last_state(other)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_training_run_leaves_rows_a_best_policy_and_its_configuration(undisturbed: Path) -> None:
    (run,) = read_rows(undisturbed, RunRow)
    assert (run.decider, run.task) == ("ppo", "digits_impaired")
    rows = read_rows(undisturbed, UpdateRow)
    assert [row.round for row in rows] == [1, 2, 3]
    assert [row.evaluation_score is not None for row in rows] == [False, True, True]
    assert all(row.first_ratio_error < 1e-5 for row in rows)
    assert json.loads((undisturbed / "config.json").read_text())["envs"] == 8
    assert load_policy(undisturbed / "best").num_slots == 3


def test_a_trained_policy_decides_like_any_other_decider(undisturbed: Path, tmp_path: Path) -> None:
    words = ["run", "--decider", "ppo", "--checkpoint", str(undisturbed / "best"), "--steps", "3"]
    cli.main([*words, "--out", str(tmp_path / "run")])
    assert len(read_rows(tmp_path / "run", EpisodeRow)) == 1


def test_an_evaluation_names_every_control(undisturbed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--lives", "2", "--steps", "2", "--processes", "1"]
    cli.main(["eval", str(undisturbed / "best"), *words])
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("ppo", "heuristic", "random", "off"))


def test_two_processes_give_the_same_run_bit_for_bit(undisturbed: Path, tmp_path: Path) -> None:
    cli.main(["train", *TINY, "--processes", "2", "--out", str(tmp_path / "run")])
    assert_same_run(undisturbed, tmp_path / "run")


@pytest.mark.parametrize("rounds_seen", [0, 1, 2])
def test_a_killed_run_resumes_to_the_same_end(undisturbed: Path, tmp_path: Path, rounds_seen: int) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-c", "from esper.scripts.cli import main; main()", "train", *TINY]
    process = subprocess.Popen(
        [*command, "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    wait_for_rows(out, rounds_seen, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    if (out / "checkpoints" / "latest").exists() and len(read_rows(out, UpdateRow)) == 3:
        pytest.skip("the run was over before it could be killed")
    cli.main(["train", "--resume", str(out)])
    assert_same_run(undisturbed, out)


def wait_for_rows(run: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    part = run / "telemetry" / ("update" if count else "run") / "part-00000.jsonl"
    while not (part.exists() and part.read_bytes().count(b"\n") >= max(count, 1)):
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline, "the run never got going"
        time.sleep(0.01)


def test_the_module_form_trains_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train.main(
        ["ppo", "--episodes", "1", "--max-epochs", "2", "--seed", "42", "--envs", "4", "--hidden-dim", "16"]
    )
    (run,) = (tmp_path / "runs").iterdir()
    assert [row.round for row in read_rows(run, UpdateRow)] == [1]


def test_a_file_gives_settings_and_flags_override_it(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text("envs = 4\nrounds = 9\nsteps = 2\nhidden_dim = 16\nevaluate_lives = 1\n")
    cli.main(["train", "--config", str(file), "--rounds", "1", "--out", str(tmp_path / "run")])
    kept = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (kept["envs"], kept["rounds"], kept["hidden_dim"]) == (4, 1, 16)


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (["train", "--task", "digit"], ["unknown task 'digit'"]),
        (["train", "--envs", "0", "--clip", "2"], ["envs", "clip"]),
        (["train", "--envs", "8", "--processes", "5"], ["5 processes were asked for", "1 to 2 are possible"]),
        (["train", "--resume", "nowhere"], ["'nowhere' is no training run"]),
        (["eval", "nowhere"], ["'nowhere' holds no checkpoint"]),
        (["run", "--decider", "ppo"], ["--checkpoint"]),
        (["run", "--checkpoint", "x"], ["checkpoint is read by the ppo decider only"]),
    ],
)
def test_a_mistake_gets_a_sentence(
    words: list[str], fragments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    for fragment in fragments:
        assert fragment in said


def test_an_unknown_key_of_a_file_is_named_with_its_neighbour(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.toml"
    file.write_text('learnig_rate = 1.0\nenvs = "many"\n')
    with pytest.raises(SystemExit):
        cli.main(["train", "--config", str(file)])
    said = capsys.readouterr().err
    assert "unknown key 'learnig_rate'; did you mean learning_rate?" in said
    assert "envs" in said


def test_a_finished_run_and_other_settings_are_refused(
    undisturbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "--resume", str(undisturbed)])
    assert "there is nothing to resume" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["train", "--resume", str(undisturbed), "--envs", "4"])
    assert "a resumed run keeps its own settings" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_refused_and_runs_nothing(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "best"
    folder.mkdir()
    for name in ("policy.json", "policy.safetensors"):
        content = (undisturbed / "best" / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(SystemExit):
        cli.main(["eval", str(folder)])
    assert "is damaged or no checkpoint" in capsys.readouterr().err
