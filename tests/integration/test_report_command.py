"""``esper report``: the report file, the command that reproduces a run, and invalid arguments."""

import os
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
from tests.integration.training import Refused, everything_in, full_disk
from tests.karn import fake_run
from tests.karn.page import Node, read_page


@pytest.fixture(scope="module")
def arms(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of two runs of three epochs, with the controllers heuristic and off."""
    out = tmp_path_factory.mktemp("runs") / "run"
    cli.main(["run", "--task", "tiny", "--steps", "3", "--against", "off", "--out", str(out)])
    return out


def shown(path: Path) -> Node:
    return read_page(path.read_text(encoding="utf-8"))


def test_report_command_writes_the_report_to_the_run_directory(
    arms: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["report", str(arms / "heuristic")])
    written = arms / "heuristic" / "report.html"
    assert capsys.readouterr().out == f"report saved in {written}\n"
    (episode,) = read_rows(arms / "heuristic", EpisodeRow)
    assert f"It reached {episode.val_score:.1f} on validation" in shown(written).text


def test_command_printed_in_a_report_reproduces_the_run(arms: Path, tmp_path: Path) -> None:
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
    """Return the name and the flags of the command that a report prints for a run with these settings."""
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
def test_command_printed_in_a_report_has_the_settings_of_the_run(settings: dict[str, object]) -> None:
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
def test_command_printed_in_a_report_has_the_settings_of_the_training(settings: dict[str, object]) -> None:
    config = checked(TrainingConfig, settings)
    kind, flags = reproduced(config, iterations=config.iterations)
    assert kind == "train"
    given = parse_flags(TrainingConfig.model_fields, "esper train", "", flags)
    assert checked(TrainingConfig, given) == config


def test_report_prints_the_esper_run_command_of_a_run_and_no_command_for_a_run_of_grow() -> None:
    row = replace(fake_run.run_row(), config=RunConfig().model_dump(mode="json"))
    assert reproduction(row) == "esper run --task digits_impaired --controller heuristic --rng-seed 0"
    assert reproduction(replace(row, config={"episodes": 1})) is None, "no command began it"


# --- invalid arguments ----------------------------------------------------------------------------


def test_report_command_refuses_a_folder_that_is_no_run(arms: Path, tmp_path: Path, refused: Refused) -> None:
    assert "the directory of a run as its first word" in refused("report")
    assert "there is no run directory" in refused("report", tmp_path / "nothing")
    assert "is not a run's directory" in refused("report", tmp_path)
    run = arms / "heuristic"
    assert "is not a run's directory" in refused("report", run, "--against", tmp_path)
    assert "--colour" in refused("report", run, "--colour", "blue")
    (tmp_path / "telemetry").mkdir()
    assert "has not written its own row yet" in refused("report", tmp_path)


def test_report_command_refuses_an_output_file_that_cannot_be_written(
    arms: Path, tmp_path: Path, refused: Refused
) -> None:
    run = arms / "heuristic"
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    said = refused("report", run, "--out", tmp_path / "loop" / "report.html")
    assert "cannot be written: " in said
    assert "; choose another file with --out" in said
    assert "is not a file, and is not replaced" in refused("report", run, "--out", tmp_path)


def test_report_command_replaces_no_link_and_no_file_that_is_not_a_report(
    arms: Path, tmp_path: Path, refused: Refused
) -> None:
    run, thesis, link = arms / "heuristic", tmp_path / "thesis.tex", tmp_path / "report.html"
    thesis.write_text("mine")
    link.symlink_to(thesis)
    assert "is a link, and is not replaced; move it away, or choose" in refused("report", run, "--out", link)
    assert "is not a report, and is not replaced" in refused("report", run, "--out", thesis)
    assert thesis.read_text() == "mine"
    assert link.is_symlink()


@pytest.mark.parametrize("name", ["rows-00000.jsonl", "rows-00001.jsonl", "link/rows-00001.jsonl"])
@pytest.mark.parametrize("command", ["report", "export"])
def test_report_and_export_write_nothing_into_the_telemetry_of_a_run(
    command: str, name: str, arms: Path, tmp_path: Path, refused: Refused
) -> None:
    telemetry = arms / "heuristic" / "telemetry"
    (tmp_path / "link").symlink_to(telemetry)
    before = everything_in(telemetry)
    out = (tmp_path if "/" in name else telemetry) / name
    assert "which only its writer may change" in refused(command, arms / "heuristic", "--out", out)
    assert everything_in(telemetry) == before


def test_report_that_does_not_fit_on_the_disk_leaves_the_old_report_whole(
    arms: Path, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.main(["report", str(arms / "off"), "--out", str(tmp_path / "report.html")])
    before = everything_in(tmp_path)
    monkeypatch.setattr(os, "fsync", full_disk)
    said = refused("report", arms / "heuristic", "--out", tmp_path / "report.html")
    assert "cannot be written: No space left on device; choose another file with --out" in said
    assert everything_in(tmp_path) == before
