"""``esper run``: written files, printed output, invalid settings, and Ctrl-C."""

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from pathlib import Path

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console

from esper.karn.run import open_run, read_rows
from esper.karn.screen import screen
from esper.kasmina.network_file import load
from esper.leyline.rows import DecisionRow, EpisodeRow, EpochRow, RunRow, SeedRow, TransitionRow
from esper.leyline.stages import Stage
from esper.run.factories import build_task
from esper.run.run_config import RunConfig
from esper.scripts import cli, train
from esper.tolaria.seeding import EpisodeStreams
from esper.tolaria.tasks import TASKS, task_named
from tests.integration.training import Refused, forked
from tests.tolaria.building import tiny_task

STEPS = 8


# --- files and output of a run --------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of two runs of eight epochs, with the controllers heuristic and off."""
    out = tmp_path_factory.mktemp("runs") / "run"
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        cli.main(["run", "--steps", str(STEPS), "--against", "off", "--out", str(out)])
    (out / "said").write_text(said.getvalue())
    return out


def test_run_command_without_a_terminal_prints_one_line_per_epoch(finished: Path) -> None:
    said = (finished / "said").read_text()
    for arm in ("heuristic", "off"):
        (lines,) = (part.splitlines() for part in said.split("run ") if f"controller {arm}," in part)
        scores = [f"score {row.val_score:>5.1f}" for row in read_rows(finished / arm, EpochRow)]
        epochs = [line for line in lines if line.startswith("epoch ")]
        assert [line[5:9] for line in epochs] == [f" {number}/{STEPS}" for number in range(1, STEPS + 1)]
        assert all(score in line for score, line in zip(scores, epochs, strict=True))


def in_a_terminal(*words: str, width: int = 80, height: int = 24) -> str:
    """Return the output of a successful command on a pseudo-terminal of the given size."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    process = forked(show_on, os.ttyname(child), words)
    sent, is_over = b"", False
    while not is_over:
        is_over = not process.is_alive()
        while select.select([parent], [], [], 0.05)[0]:
            sent += os.read(parent, 65_536)
    os.close(parent)
    os.close(child)
    assert process.exitcode == 0, sent
    return sent.decode()


def show_on(terminal: str, words: tuple[str, ...]) -> None:
    """Run a command of ``esper`` in this child process."""
    file = os.open(terminal, os.O_RDWR)
    for number in range(3):
        os.dup2(file, number)
    os.environ["TERM"] = "xterm-256color"
    sys.stdout = os.fdopen(1, "w", buffering=1)
    cli.main(words)
    sys.stdout.flush()


def test_run_command_on_a_terminal_prints_lines_within_its_width_and_ends_with_the_final_screen(
    tmp_path: Path,
) -> None:
    sent = in_a_terminal("run", "--steps", "4", "--out", str(tmp_path / "run"))
    # Each terminal screen overwrites the previous screen from the start of a line.
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


def test_run_command_writes_rows_of_every_telemetry_table(finished: Path) -> None:
    run = finished / "heuristic"
    (row,) = read_rows(run, RunRow)
    assert (row.task, row.controller, row.rng_seed) == ("digits_impaired", "heuristic", 0)
    assert (row.slots, row.host_params) == (["r0c0", "r0c1", "r0c2"], 174)
    assert [r.epoch for r in read_rows(run, EpochRow)] == list(range(1, STEPS + 1))
    assert [r.epoch for r in read_rows(run, DecisionRow)] == list(range(STEPS))
    assert len(read_rows(run, EpisodeRow)) == 1
    assert any(r.contribution is not None for r in read_rows(run, SeedRow))
    fates = {Stage(r.to_stage) for r in read_rows(run, TransitionRow)}
    assert {Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED} <= fates


def test_twin_scores_in_epoch_rows_equal_the_scores_of_a_run_with_the_off_controller(finished: Path) -> None:
    twin = [row.twin_score for row in read_rows(finished / "heuristic", EpochRow)]
    off = [row.val_score for row in read_rows(finished / "off", EpochRow)]
    assert twin == off


def test_network_saved_by_the_run_command_has_the_validation_score_of_the_episode_row(finished: Path) -> None:
    network = load(finished / "heuristic" / "model" / "episode-0.safetensors").eval()
    task = task_named("digits_impaired")
    splits = task.load(EpisodeStreams(0, 0, 0).generator("split"))
    with torch.inference_mode():
        scores = task.objective.sample_scores(network(splits.validation.x), splits.validation.y)
    (episode,) = read_rows(finished / "heuristic", EpisodeRow)
    assert scores.mean().item() == pytest.approx(episode.val_score, abs=1e-4)


@pytest.mark.usefixtures("cache")
def test_run_command_prints_two_different_episodes_as_one_json_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "--task", "tiny", "--episodes", "2", "--slots", "r0c0", "r0c2", "--steps", "6", "--json"]
    cli.main([*words, "--out", str(tmp_path / "run")])
    first, second = json.loads(capsys.readouterr().out)["heuristic"]["episodes"]
    assert (first["epochs"], second["epochs"]) == (6, 6)
    scores = [(row.episode, row.test_score) for row in read_rows(tmp_path / "run", EpisodeRow)]
    assert scores == [(0, first["test_score"]), (1, second["test_score"])]
    assert first["test_score"] != second["test_score"]
    assert {row.slot for row in read_rows(tmp_path / "run", SeedRow)} == {0, 2}, "only the named slots grow"


@pytest.mark.usefixtures("cache")
def test_python_m_esper_scripts_train_heuristic_gives_the_scores_of_esper_run(tmp_path: Path) -> None:
    words = ["--task", "tiny", "--slots", "r0c0", "r0c1", "--max-epochs", "3", "--seed", "5"]
    train.main(["heuristic", *words, "--out", str(tmp_path / "module")])
    words = ["--task", "tiny", "--slots", "r0c0", "r0c1", "--steps", "3", "--rng-seed", "5"]
    cli.main(["run", *words, "--out", str(tmp_path / "command")])
    scores = [[r.val_score for r in read_rows(tmp_path / d, EpochRow)] for d in ("module", "command")]
    assert scores[0] == scores[1]


def test_each_setting_of_the_run_command_changes_the_telemetry_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Change the configuration of a run key by key and compare the telemetry rows."""
    monkeypatch.setitem(TASKS, "tiny", tiny_task())
    monkeypatch.setitem(TASKS, "other", tiny_task((4, 4, 4)))
    base = ["run", "--task", "tiny", "--json"]
    changes = {
        "task": "--task other",
        "steps": "--steps 5",
        "budget": "--budget 8M",
        "controller": "--controller random",
        "rng_seed": "--rng-seed 1",
        "episodes": "--episodes 2",
        "slots": "--slots 1",
        "rotation": "--rotation norm",
        "incubation_epochs": "--incubation-epochs 0",
        "auto_forward": "--no-auto-forward",
        "plan": "--controller periodic --plan norm@r0c1:2",
        "amp": "--amp bfloat16",
    }
    aside = {"checkpoint", "against", "detail", "out", "as_json", "devices", "policy_device"}
    own_data = {"data"}  # The test below changes it, because only tasks on data of the user have it.
    assert set(changes) | aside | own_data == set(RunConfig.model_fields)

    def rows(name: str, extra: str) -> list[tuple[object, ...]]:
        out = tmp_path / name
        length = [] if "--budget" in extra or "--steps" in extra else ["--steps", "6"]
        cli.main([*base, *length, *extra.split(), "--out", str(out)])
        epochs = [(r.epoch, r.val_loss, r.params) for r in read_rows(out, EpochRow)]
        return [*epochs, *[(r.action, r.succeeded) for r in read_rows(out, DecisionRow)]]

    reference = rows("reference", "")
    periodic = rows("periodic", "--controller periodic")
    for name, extra in changes.items():
        assert rows(name, extra) != (periodic if name == "plan" else reference), name


def test_the_setting_data_names_the_text_file_of_text_scaling(tmp_path: Path) -> None:
    def data_of(text: str) -> str:
        file = tmp_path / f"{len(text)}.txt"
        file.write_text(text * 20_000)
        task = build_task(RunConfig(task="text_scaling", data=file))
        splits = task.load(torch.Generator().manual_seed(0))
        return bytes(splits.train.first(1).x[0].tolist()).decode() + task.digest()

    one, other = data_of("one text; "), data_of("another text, longer. ")
    assert "one text; one text" in one
    assert "another text, longer. another" in other
    assert one[-64:] != other[-64:]


# --- invalid settings -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (["run", "--task", "digit"], ["unknown task 'digit'", "digits"]),
        (["run", "--controller", "heuristc"], ["unknown controller 'heuristc'", "did you mean heuristic"]),
        (["run", "--against", "of"], ["unknown controller 'of'", "off"]),
        (["run", "--budget", "1x"], ["a budget is a number of FLOPs such as 0.5T"]),
        (["run", "--budget", "1T", "--steps", "3"], ["budget and steps both set", "leave one of them out"]),
        (["run", "--budget", "1M"], ["a budget of 1,000,000 FLOP", "give 3,235,840"]),
        (["run", "--controller", "counting"], ["unknown blueprint 'stack'"]),
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
def test_run_command_with_invalid_settings_ends_with_a_one_sentence_error(
    words: list[str], fragments: list[str], tmp_path: Path, refused: Refused
) -> None:
    said = refused(*words, *(["--out", tmp_path / "run"] if words[0] == "run" else []))
    for fragment in fragments:
        assert fragment in said
    assert not (tmp_path / "run").exists(), "nothing may be written for a command that cannot run"


def test_run_command_refuses_a_non_empty_or_unwritable_run_directory(
    tmp_path: Path, refused: Refused
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert "already holds notes.txt" in refused("run", "--out", tmp_path)
    assert "cannot be written" in refused("run", "--out", tmp_path / "notes.txt" / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


# --- Ctrl-C ---------------------------------------------------------------------------------------


def test_ctrl_c_ends_a_run_with_the_rows_of_all_finished_epochs_on_disk(tmp_path: Path) -> None:
    out, said = tmp_path / "run", tmp_path / "said"
    process = forked(run_for_long, out, said)
    rows_file = out / "telemetry" / "rows-00000.jsonl"
    deadline = time.monotonic() + 600
    while not (rows_file.exists() and rows_file.stat().st_size > 5000):
        assert process.is_alive()
        assert time.monotonic() < deadline, "the run never got going"
        time.sleep(0.05)
    os.kill(process.pid or 0, signal.SIGINT)
    process.join(timeout=600)

    assert process.exitcode == 130
    sentence = said.read_text()
    assert sentence.count("\n") == 1
    assert sentence.startswith("esper: interrupted in episode 0")
    assert str(out) in sentence
    epochs = [row.epoch for row in read_rows(out, EpochRow)]
    assert epochs == list(range(1, len(epochs) + 1))
    assert f"the {epochs[-1]} finished epochs" in sentence


def run_for_long(out: Path, said: Path) -> None:
    """Run a command of ``esper`` in this child process."""
    # The SIGINT handler of Python is restored, because background jobs of a shell ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    cli.main(["run", "--controller", "off", "--steps", "2000", "--json", "--out", str(out)])
