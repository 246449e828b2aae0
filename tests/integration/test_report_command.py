"""``esper report``: its file, the command that repeats a run, and invalid arguments."""

import shlex
from pathlib import Path

import pytest
from msgspec.structs import replace
from pydantic import BaseModel

from esper.karn.run import read_rows
from esper.leyline.rows import EpisodeRow
from esper.run.run_config import RunConfig, TrainingConfig, checked, run_config
from esper.scripts import cli
from esper.scripts.flags import parse_flags
from esper.scripts.report_command import reproduction
from tests.integration.training import Refused
from tests.karn import fake_run
from tests.karn.page import Node, read_page


@pytest.fixture(scope="module")
def arms(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a heuristic run and an off run of three epochs each."""
    out = tmp_path_factory.mktemp("runs") / "run"
    cli.main(["run", "--task", "tiny", "--steps", "3", "--against", "off", "--out", str(out)])
    return out


def shown(path: Path) -> Node:
    return read_page(path.read_text(encoding="utf-8"))


def test_a_report_is_written_to_the_run_directory(arms: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["report", str(arms / "heuristic")])
    written = arms / "heuristic" / "report.html"
    assert capsys.readouterr().out == f"report saved in {written}\n"
    (episode,) = read_rows(arms / "heuristic", EpisodeRow)
    assert f"It reached {episode.val_score:.1f} on validation" in shown(written).text


def test_the_command_in_a_report_repeats_the_run(arms: Path, tmp_path: Path) -> None:
    words = ["report", str(arms / "off"), "--against", str(arms / "heuristic")]
    cli.main([*words, "--out", str(tmp_path / "report.html")])
    assert "Against heuristic, in one episode begun alike: " in shown(tmp_path / "report.html").text
    words = shlex.split(shown(tmp_path / "report.html").one("pre").text)
    assert words[0] == "esper"
    cli.main([*words[1:], "--out", str(tmp_path / "again")])
    for arm in ("heuristic", "off"):
        (before,), (after,) = (read_rows(run / arm, EpisodeRow) for run in (arms, tmp_path / "again"))
        assert (before.val_score, before.flops) == (after.val_score, after.flops)


def reproduced(config: BaseModel, **changes: object) -> tuple[str, list[str]]:
    """Return the command and the parsed flags that a report prints for these settings."""
    row = replace(fake_run.run_row(**changes), config=config.model_dump(mode="json"))
    name, kind, *flags = shlex.split(reproduction(row) or "")
    assert name == "esper"
    return kind, flags


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"controller": "periodic", "plan": "norm@r0c1:2, norm@r0c0:3", "slots": ("r0c0", "r0c1"), "steps": 9},
        {"controller": "random", "against": ("off", "heuristic"), "rotation": ("norm",), "as_json": True},
    ],
)
def test_the_command_in_a_report_has_the_settings_of_a_run(settings: dict[str, object]) -> None:
    config = run_config(**settings)
    kind, flags = reproduced(config)
    assert kind == "run"
    given = parse_flags(RunConfig.model_fields, "esper run", "", flags)
    assert checked(RunConfig, given) == config.model_copy(update={"out": None, "as_json": False})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"rng_seed": 7, "vary_slots": True, "conditioned": False, "hold_heads": ["tempo", "style"]},
        {"learning_rate": 3e-4, "gamma": 0.99, "capacity": 5, "reward_family": "sparse", "iterations": 2},
    ],
)
def test_the_command_in_a_report_has_the_settings_of_a_training(settings: dict[str, object]) -> None:
    config = checked(TrainingConfig, settings)
    kind, flags = reproduced(config, iterations=config.iterations)
    assert kind == "train"
    given = parse_flags(TrainingConfig.model_fields, "esper train", "", flags)
    assert checked(TrainingConfig, given) == config


def test_the_command_has_task_controller_and_rng_seed_and_is_missing_for_runs_of_grow() -> None:
    row = replace(fake_run.run_row(), config=RunConfig().model_dump(mode="json"))
    assert reproduction(row) == "esper run --task digits_impaired --controller heuristic --rng-seed 0"
    assert reproduction(replace(row, config={"episodes": 1})) is None, "no command began it"


# --- invalid arguments ----------------------------------------------------------------------------


def test_a_report_of_a_folder_that_is_no_run_is_refused(arms: Path, tmp_path: Path, refused: Refused) -> None:
    assert "the directory of a run as its first word" in refused("report")
    assert "there is no run directory" in refused("report", tmp_path / "nothing")
    assert "is not a run's directory" in refused("report", tmp_path)
    run = arms / "heuristic"
    assert "is not a run's directory" in refused("report", run, "--against", tmp_path)
    assert "--colour" in refused("report", run, "--colour", "blue")
    (tmp_path / "telemetry").mkdir()
    assert "has not written its own row yet" in refused("report", tmp_path)


def test_a_report_to_an_unwritable_file_is_refused(arms: Path, tmp_path: Path, refused: Refused) -> None:
    run = arms / "heuristic"
    said = refused("report", run, "--out", tmp_path / "missing" / "report.html")
    assert "cannot be written: No such file or directory; choose another file with --out" in said
    assert "cannot be written: Is a directory" in refused("report", run, "--out", tmp_path)
