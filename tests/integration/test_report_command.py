"""The report command as a user meets it: what it writes, its answers to mistakes, how to do it again."""

import shlex
from pathlib import Path

import pytest
from msgspec.structs import replace
from pydantic import BaseModel

from esper.config import RunConfig, TrainingConfig, checked, run_config
from esper.karn.run import read_rows
from esper.leyline.rows import EpisodeRow
from esper.scripts import cli
from esper.scripts.flags import parse_flags
from esper.scripts.report_command import reproduction
from tests.integration.training import Refused
from tests.karn import fake_run
from tests.karn.page import Node, read_page


@pytest.fixture(scope="module")
def arms(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the heuristic beside its control, three epochs each."""
    out = tmp_path_factory.mktemp("runs") / "run"
    cli.main(["run", "--task", "tiny", "--steps", "3", "--against", "off", "--out", str(out)])
    return out


def shown(path: Path) -> Node:
    return read_page(path.read_text(encoding="utf-8"))


def test_a_report_is_written_into_the_run_s_directory(arms: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["report", str(arms / "heuristic")])
    written = arms / "heuristic" / "report.html"
    assert capsys.readouterr().out == f"report saved in {written}\n"
    (episode,) = read_rows(arms / "heuristic", EpisodeRow)
    assert f"It reached {episode.val_score:.1f} on validation" in shown(written).text


def test_the_command_that_is_shown_does_the_same_again(arms: Path, tmp_path: Path) -> None:
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
    """The command and the flags that a report gives for a run of these settings."""
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
def test_settings_of_a_run_survive_as_flags(settings: dict[str, object]) -> None:
    config = run_config(**settings)
    kind, flags = reproduced(config)
    assert kind == "run"
    given, _ = parse_flags(RunConfig, "esper run", "", flags)
    assert checked(RunConfig, given) == config.model_copy(update={"out": None, "as_json": False})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"rng_seed": 7, "vary_slots": True, "conditioned": False, "hold_heads": ["tempo", "style"]},
        {"learning_rate": 3e-4, "gamma": 0.99, "capacity": 5, "reward_family": "sparse", "iterations": 2},
    ],
)
def test_settings_of_a_training_survive_as_flags(settings: dict[str, object]) -> None:
    config = checked(TrainingConfig, settings)
    kind, flags = reproduced(config, iterations=config.iterations)
    assert kind == "train"
    given, _ = parse_flags(TrainingConfig, "esper train", "", flags)
    assert checked(TrainingConfig, given) == config


def test_the_command_names_what_matters_even_where_it_is_the_default_and_is_unknown_for_other_runs() -> None:
    row = replace(fake_run.run_row(), config=RunConfig().model_dump(mode="json"))
    assert reproduction(row) == "esper run --task digits_impaired --controller heuristic --rng-seed 0"
    assert reproduction(replace(row, config={"episodes": 1})) is None, "no command began it"


# --- mistakes -------------------------------------------------------------------------------------


def test_what_is_not_a_run_is_refused(arms: Path, tmp_path: Path, refused: Refused) -> None:
    assert "the directory of a run as its first word" in refused("report")
    assert "there is no run directory" in refused("report", tmp_path / "nothing")
    assert "is not a run's directory" in refused("report", tmp_path)
    run = arms / "heuristic"
    assert "is not a run's directory" in refused("report", run, "--against", tmp_path)
    assert "--colour" in refused("report", run, "--colour", "blue")
    (tmp_path / "telemetry").mkdir()
    assert "has not written its own row yet" in refused("report", tmp_path)


def test_a_file_that_cannot_be_written_is_refused(arms: Path, tmp_path: Path, refused: Refused) -> None:
    run = arms / "heuristic"
    said = refused("report", run, "--out", tmp_path / "missing" / "report.html")
    assert "cannot be written: No such file or directory; choose another file with --out" in said
    assert "cannot be written: Is a directory" in refused("report", run, "--out", tmp_path)
