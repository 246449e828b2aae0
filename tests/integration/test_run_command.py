"""The run command as a user meets it: what it leaves behind, and what it says to a mistake."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console

from esper.karn.query import read_rows
from esper.karn.run import open_run
from esper.karn.screen import screen
from esper.kasmina import load_committed
from esper.leyline.events import DecisionRow, EpisodeRow, EpochRow, RunRow, SeedRow, TransitionRow
from esper.leyline.stages import Stage
from esper.scripts import cli, train
from esper.tolaria.seeding import EpisodeStreams
from esper.tolaria.tasks import TASKS, task_named
from tests.tolaria.building import tiny_task


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The sentence of a command that must fail; a traceback or a zero exit fails the test."""
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code not in (0, None)
    said = capsys.readouterr()
    assert "Traceback" not in said.err + said.out
    return said.err


# --- what a run leaves behind ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A heuristic run of eleven epochs beside its control: long enough to fossilize a seed."""
    out = tmp_path_factory.mktemp("runs") / "run"
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        cli.main(["run", "--task", "digits_impaired", "--steps", "11", "--against", "off", "--out", str(out)])
    (out / "said").write_text(said.getvalue())
    return out


def test_without_a_terminal_every_epoch_has_exactly_one_line(finished: Path) -> None:
    said = (finished / "said").read_text()
    for arm in ("heuristic", "off"):
        (lines,) = (part.splitlines() for part in said.split("run ") if f"controller {arm}," in part)
        scores = [f"score {row.val_score:>5.1f}" for row in read_rows(finished / arm, EpochRow)]
        epochs = [line for line in lines if line.startswith("epoch ")]
        assert [line[6:11] for line in epochs] == [f"{number:>2}/11" for number in range(1, 12)]
        assert all(score in line for score, line in zip(scores, epochs, strict=True))


def in_a_terminal(*words: str, width: int = 80, height: int = 24) -> str:
    """What a pseudo-terminal of that size is sent by a command that ends well."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    command = [sys.executable, "-c", "from esper.scripts.cli import main; main()", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color"}
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=environment)
    os.close(child)
    sent = b""
    with contextlib.suppress(OSError):  # how Linux says that the last writer is gone
        while piece := os.read(parent, 65_536):
            sent += piece
    os.close(parent)
    assert process.wait(timeout=60) == 0, sent
    return sent.decode()


def test_on_a_terminal_no_line_is_too_wide_and_the_last_screen_is_the_answer(tmp_path: Path) -> None:
    sent = in_a_terminal("run", "--steps", "4", "--out", str(tmp_path / "run"))
    # A screen is drawn over the one before from the start of a line.
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", sent))
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(screen(open_run(tmp_path / "run"), 80))
    answer = [line.rstrip() for line in console.export_text().splitlines()]

    assert max(cell_len(line) for line in lines if not line.startswith("run saved in")) <= 80
    start = max(
        at for at, line in enumerate(lines) if line.startswith("digits_impaired · heuristic · finished")
    )
    assert [line.rstrip() for line in lines[start : start + len(answer)]] == answer
    assert sent.count("\x1b[?25l") == sent.count("\x1b[?25h") == 1, "the cursor comes back"


def test_every_table_of_a_run_reads_back(finished: Path) -> None:
    run = finished / "heuristic"
    (row,) = read_rows(run, RunRow)
    assert (row.task, row.controller, row.rng_seed, row.slots) == (
        "digits_impaired",
        "heuristic",
        0,
        ["r0c0", "r0c1", "r0c2"],
    )
    assert row.host_params == 174
    assert [r.epoch for r in read_rows(run, EpochRow)] == list(range(1, 12))
    assert [r.epoch for r in read_rows(run, DecisionRow)] == list(range(11))
    assert len(read_rows(run, EpisodeRow)) == 1
    assert any(r.contribution is not None for r in read_rows(run, SeedRow))
    fates = {Stage(r.to_stage) for r in read_rows(run, TransitionRow)}
    assert {Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED} <= fates


def test_the_twin_in_the_rows_is_the_off_run(finished: Path) -> None:
    twin = [row.twin_score for row in read_rows(finished / "heuristic", EpochRow)]
    off = [row.val_score for row in read_rows(finished / "off", EpochRow)]
    assert twin == off


def test_the_saved_network_scores_what_the_run_reported(finished: Path) -> None:
    network = load_committed(finished / "heuristic" / "model" / "episode-0").eval()
    task = task_named("digits_impaired")
    splits = task.load(EpisodeStreams(0, 0, 0).generator("split"))
    with torch.inference_mode():
        scores = task.objective.sample_scores(network(splits.validation.x), splits.validation.y)
    (episode,) = read_rows(finished / "heuristic", EpisodeRow)
    assert scores.mean().item() == pytest.approx(episode.val_score, abs=1e-4)


def test_json_prints_one_document_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["run", "--steps", "2", "--json", "--out", str(tmp_path / "run")])
    result = json.loads(capsys.readouterr().out)
    (episode,) = result["heuristic"]["episodes"]
    assert episode["epochs"] == 2
    assert episode["host_params"] == 174


def test_episodes_are_different_episodes(tmp_path: Path) -> None:
    cli.main(
        ["run", "--controller", "off", "--steps", "2", "--episodes", "2", "--out", str(tmp_path / "run")]
    )
    first, second = read_rows(tmp_path / "run", EpisodeRow)
    assert (first.episode, second.episode) == (0, 1)
    assert first.test_score != second.test_score


def test_only_the_named_slots_grow(tmp_path: Path) -> None:
    out = tmp_path / "run"
    cli.main(["run", "--steps", "8", "--slots", "r0c0", "r0c2", "--out", str(out)])
    assert {row.slot for row in read_rows(out, SeedRow)} == {0, 2}


def test_the_module_form_reaches_the_same_run(tmp_path: Path) -> None:
    words = ["heuristic", "--slots", "r0c0", "r0c1", "r0c2", "--max-epochs", "3", "--seed", "5"]
    train.main([*words, "--out", str(tmp_path / "module")])
    cli.main(["run", "--steps", "3", "--rng-seed", "5", "--out", str(tmp_path / "command")])
    scores = [[r.val_score for r in read_rows(tmp_path / d, EpochRow)] for d in ("module", "command")]
    assert scores[0] == scores[1]


def test_each_setting_changes_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key of the configuration has an effect on the rows."""
    monkeypatch.setitem(TASKS, "tiny", tiny_task())
    base = ["run", "--task", "tiny", "--steps", "7"]
    changes = {
        "task": ["--task", "digits_impaired"],
        "controller": ["--controller", "random"],
        "rng_seed": ["--rng-seed", "1"],
        "episodes": ["--episodes", "2"],
        "slots": ["--slots", "1"],
        "rotation": ["--rotation", "norm"],
        "incubation": ["--incubation", "straight_through"],
        "incubation_epochs": ["--incubation-epochs", "0"],
        "plan": ["--controller", "periodic", "--plan", "norm@r0c1:2"],
    }

    def rows(name: str, extra: list[str]) -> list[tuple[object, ...]]:
        out = tmp_path / name
        cli.main([*base, *extra, "--out", str(out)])
        epochs = [(r.epoch, r.val_loss, r.params) for r in read_rows(out, EpochRow)]
        return [*epochs, *[(r.action, r.succeeded) for r in read_rows(out, DecisionRow)]]

    reference = rows("reference", [])
    periodic = rows("periodic", ["--controller", "periodic"])
    for name, extra in changes.items():
        assert rows(name, extra) != (periodic if name == "plan" else reference), name


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (["run", "--task", "digit"], ["unknown task 'digit'", "digits"]),
        (["run", "--controller", "heuristc"], ["unknown controller 'heuristc'", "did you mean heuristic"]),
        (["run", "--against", "of"], ["unknown controller 'of'", "off"]),
        (["run", "--slots", "r0c9"], ["slot 'r0c9' is not in this model", "r0c0, r0c1, r0c2"]),
        (["run", "--slots", "0"], ["a host can have 1 to 1000 slots; found 0"]),
        (["run", "--rotation", "conv_hevy"], ["unknown blueprint 'conv_hevy'", "did you mean conv_heavy"]),
        (
            ["run", "--controller", "periodic", "--plan", "conv_hevy@r0c0:0"],
            ["unknown blueprint 'conv_hevy'", "did you mean conv_heavy"],
        ),
        (["run", "--steps", "0"], ["steps", "greater than or equal to 1", "found 0"]),
        (["run", "--steps", "0", "--episodes", "-1"], ["steps", "episodes"]),
        (["run", "--plan", "every:2"], ["plan is read by the periodic controller only"]),
        (["rn"], ["unknown command 'rn'", "did you mean run"]),
    ],
)
def test_a_mistake_gets_a_sentence(
    words: list[str], fragments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if words[0] == "run":
        words = [*words, "--out", str(tmp_path / "run")]
    said = refusal(capsys, *words)
    for fragment in fragments:
        assert fragment in said
    assert not (tmp_path / "run").exists(), "nothing may be written for a command that cannot run"


def test_an_existing_run_directory_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    said = refusal(capsys, "run", "--steps", "2", "--out", str(tmp_path))
    assert "already holds notes.txt" in said
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_unwritable_run_directory_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    said = refusal(capsys, "run", "--steps", "2", "--out", str(tmp_path / "file" / "run"))
    assert "cannot be written" in said


# --- Ctrl-C ---------------------------------------------------------------------------------------


def test_ctrl_c_keeps_what_was_finished(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = "from esper.scripts.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", command, "run", "--controller", "off", "--steps", "2000", "--out", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    rows_file = out / "telemetry" / "rows-00000.jsonl"
    deadline = time.monotonic() + 600
    while not (rows_file.exists() and rows_file.stat().st_size > 5000):
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline, "the run never got going"
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=600)

    assert process.returncode == 130
    assert "Traceback" not in said
    assert "interrupted in episode 0" in said
    assert str(out) in said
    epochs = [row.epoch for row in read_rows(out, EpochRow)]
    assert epochs == list(range(1, len(epochs) + 1))
    assert f"the {epochs[-1]} finished epochs" in said
