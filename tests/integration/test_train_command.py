"""``esper train`` and ``esper eval``: written files, printed output, and invalid arguments."""

import json
import re
import shlex
from pathlib import Path

import pytest

from esper.karn.run import read_rows
from esper.karn.statistics import estimate
from esper.leyline.rows import EpisodeRow, RunRow, UpdateRow
from esper.scripts import cli, train
from esper.scripts.eval_command import run_arms
from esper.tamiyo.policy.checkpoint import load_policy
from esper.tolaria.seeding import TEST_SEEDS
from tests.integration.training import Refused

pytestmark = pytest.mark.usefixtures("cache")

WORDS = shlex.split(
    "train --task tiny --envs 2 --iterations 3 --steps 4 --hidden-dim 16 --evaluate-episodes 1"
    " --evaluate-every 2 --checkpoint-every 1"
)


@pytest.fixture(scope="module")
def taught(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("taught") / "run"
    cli.main([*WORDS, "--out", str(out)])
    return out


# --- files and output of a run --------------------------------------------------------------------


def test_train_command_writes_telemetry_rows_the_best_policy_and_the_configuration(taught: Path) -> None:
    (run,) = read_rows(taught, RunRow)
    assert (run.controller, run.task) == ("ppo", "tiny")
    rows = read_rows(taught, UpdateRow)
    assert [row.iteration for row in rows] == [1, 2, 3]
    assert [row.evaluation_score is not None for row in rows] == [False, True, True]
    assert all(row.first_ratio_error < 1e-5 for row in rows)
    assert all(row.update_epochs == (row.early_stop_update_epoch or 6) for row in rows)
    assert json.loads((taught / "config.json").read_text())["envs"] == 2
    assert load_policy(taught / "best").num_slots == 3


def test_run_command_with_a_trained_policy_prints_settings_that_differ_from_its_training(
    taught: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "--task", "tiny", "--controller", "ppo", "--checkpoint", str(taught / "best")]
    for steps, said in (("4", ""), ("3", "esper: the policy decides on steps 3 (trained on 4)\n")):
        cli.main([*words, "--steps", steps, "--out", str(tmp_path / steps)])
        assert capsys.readouterr().err == said
        assert len(read_rows(tmp_path / steps, EpisodeRow)) == 1


def test_eval_command_prints_the_score_of_every_arm_without_rent_and_after_rent(
    taught: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that scores are means over the episodes of an rng seed, and that scores after rent are lower."""
    words = ["--episodes", "2", "--episodes-each", "2", "--steps", "6", "--processes", "1", "--rent", "1"]
    cli.main(["eval", str(taught / "best"), *words])
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert {"ppo", "heuristic", "random", "off"} <= rows.keys()

    off = {"off": {"task": "tiny", "controller": "off", "steps": 6}}
    reports = [report for own in run_arms(off, TEST_SEEDS[:2], episodes=2)["off"] for report in own]
    scores = [report.test_score for report in reports]
    means = [(scores[0] + scores[1]) / 2, (scores[2] + scores[3]) / 2]
    assert str(estimate(means)) in rows["off"]
    assert str(estimate(scores)) not in rows["off"]

    estimates = {arm: re.findall(r"-?[\d.]+ ±", rows[arm]) for arm in ("heuristic", "off")}
    assert estimates["off"][0] == estimates["off"][2], "off grows nothing"
    bare, _, after_rent, _ = (float(text.split()[0]) for text in estimates["heuristic"])
    grown = int(rows["heuristic"].replace(",", "").split()[7]) - reports[0].host_params
    assert grown > 0
    assert bare - after_rent == pytest.approx(100 * grown / 1000, abs=0.2)


@pytest.mark.parametrize(
    ("episodes", "envs", "expected", "said"),
    [
        ("5", "32", (5, 1), ""),
        ("4", "2", (2, 2), ""),
        ("5", "2", (2, 3), "5 episodes are rounded up to 6: 3 iterations of 2 environments\n"),
    ],
)
def test_number_of_episodes_is_converted_to_environments_times_iterations(
    episodes: str,
    envs: str,
    expected: tuple[int, int],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = f"--task tiny --episodes {episodes} --max-epochs 1 --seed 42 --envs {envs} --hidden-dim 16"
    train.main(["ppo", *words.split(), "--evaluate-episodes", "1"])
    assert capsys.readouterr().out.startswith(said)
    (run,) = (tmp_path / "runs").iterdir()
    kept = json.loads((run / "config.json").read_text())
    assert (kept["envs"], kept["iterations"]) == expected
    assert [row.iteration for row in read_rows(run, UpdateRow)] == list(range(1, expected[1] + 1))


def test_flags_of_the_train_command_override_the_settings_of_a_configuration_file(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text('task = "tiny"\nenvs = 4\niterations = 9\nhidden_dim = 16\nevaluate_episodes = 1\n')
    cli.main(["train", "--config", str(file), "--iterations", "1", "--out", str(tmp_path / "run")])
    kept = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (kept["envs"], kept["iterations"], kept["hidden_dim"]) == (4, 1, 16)


# --- invalid arguments ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (["train", "--task", "digit"], ["unknown task 'digit'"]),
        (["train", "--envs", "0", "--clip", "2"], ["envs", "clip"]),
        (["train", "--envs", "6", "--processes", "5"], ["5 processes were asked for", "1 to 3 are possible"]),
        (["train", "--envs", "6", "--processes", "0"], ["0 processes were asked for", "1 to 3 are possible"]),
        (["train", "--slots", "3", "--capacity", "2"], ["room for 2 slots", "a host with 3"]),
        (["train", "--episodes", "0"], ["iterations: "]),
        (["train", "--episodes", "5", "--iterations", "2"], ["--episodes and --iterations both"]),
        (["train", "--resume", "nowhere"], ["'nowhere' is no training run"]),
        (["eval", "nowhere"], ["'nowhere' holds no checkpoint"]),
        (["run", "--controller", "ppo"], ["--checkpoint"]),
        (["run", "--checkpoint", "x"], ["checkpoint is read by the ppo controller only"]),
    ],
)
def test_train_eval_or_run_with_invalid_settings_ends_with_a_one_sentence_error(
    words: list[str], fragments: list[str], refused: Refused
) -> None:
    said = refused(*words)
    for fragment in fragments:
        assert fragment in said


def test_unknown_key_of_a_configuration_file_is_refused_with_the_nearest_known_key(
    tmp_path: Path, refused: Refused
) -> None:
    file = tmp_path / "bad.toml"
    file.write_text('learnig_rate = 1.0\nenvs = "many"\n')
    said = refused("train", "--config", file)
    assert "unknown key 'learnig_rate'; did you mean learning_rate?" in said
    assert "envs" in said


def test_train_command_refuses_to_resume_a_finished_run_and_to_resume_a_run_with_other_settings(
    taught: Path, refused: Refused
) -> None:
    assert "there is nothing to resume" in refused("train", "--resume", taught)
    said = refused("train", "--resume", taught, "--envs", "4")
    assert "a resumed run keeps its own settings" in said
