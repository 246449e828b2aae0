"""``esper watch`` on running, killed, finished and resumed runs."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from esper.karn.run import open_run
from esper.leyline.rows import EpochRow, Row
from esper.nissa.writer import RunWriter
from esper.scripts import cli, watch_command
from esper.scripts.watch_command import WatchConfig, watch
from tests.integration.training import Refused
from tests.karn import fake_run, fake_training

# --- running runs ----------------------------------------------------------------------------------


@pytest.fixture
def watch_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """Return a function that runs ``esper watch`` and returns its output; a writer does one action before
    each refresh."""
    writer, episode = RunWriter(tmp_path / "run"), fake_run.episode()
    # With an unlimited share of time for refreshing, ``esper watch`` refreshes without delay.
    monkeypatch.setattr(watch_command, "SHARE_OF_TIME", 1e9)

    def do(deed: str) -> None:
        if deed == "interrupt":
            raise KeyboardInterrupt
        if deed == "kill":
            # A telemetry row in the buffer of a killed writer is lost.
            writer.emit(fake_run.epoch_row(8))
            # Releasing the writer lock simulates a killed process, whose locks the kernel releases.
            writer._lock.release()
            return
        rows = [fake_run.run_row()] if deed == "run" else episode
        for row in rows:
            writer.emit(row)
            if deed == "epoch" and isinstance(row, EpochRow):
                break
        writer.flush()
        if deed == "end":
            writer.close()

    def watched(*deeds: str) -> list[str]:
        left, shown = list(deeds), []

        def go_on(seconds: float) -> None:
            shown.append(capsys.readouterr().out)
            do(left.pop(0))

        monkeypatch.setattr("time.sleep", go_on)
        cli.main(["watch", str(tmp_path / "run")])
        said = capsys.readouterr()
        assert said.err == ""
        return [*shown, said.out]

    return watched


def test_watch_command_shows_every_epoch_of_a_running_run_until_the_run_ends(
    watch_while: Callable[..., list[str]],
) -> None:
    before, begun, *epochs, rest = watch_while("run", "epoch", "epoch", "epoch", "end")
    assert before == ""
    assert begun.startswith("run demo: task digits_impaired")
    for number, shown in enumerate(epochs):
        assert shown.splitlines()[-1].startswith(f"epoch {number}/8")
    *_, episode, last = rest.splitlines()
    assert episode.startswith("episode 0 ended (horizon)")
    assert last.endswith("run has finished after epoch 8 of 8")


@pytest.mark.parametrize(
    ("deeds", "end"),
    [
        (("run", "epoch", "epoch", "kill"), "run has stopped after epoch 1 of 8"),
        (("kill",), "run has stopped before it recorded anything"),
    ],
)
def test_watch_command_reports_a_killed_run_as_stopped(
    deeds: tuple[str, ...], end: str, watch_while: Callable[..., list[str]]
) -> None:
    (last,) = watch_while(*deeds)[-1].splitlines()
    assert last.endswith(end)


def test_ctrl_c_ends_the_watch_command_without_an_error(watch_while: Callable[..., list[str]]) -> None:
    assert watch_while("run", "interrupt")[-1] == ""


# --- finished runs --------------------------------------------------------------------------------


@pytest.fixture
def training(tmp_path: Path) -> Path:
    seconds = iter(range(100_000))
    with RunWriter(tmp_path / "teach", clock=lambda: float(next(seconds))) as writer:
        for row in fake_training.course(3):
            writer.emit(row)
    return tmp_path / "teach"


def watched(run: Path, **settings: object) -> str:
    """Return the output of ``esper watch`` on a terminal of 80 columns and 24 lines."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system=None, width=80, height=24)
    watch(open_run(run), WatchConfig.model_validate(settings), console)
    return file.getvalue()


def test_watch_command_shows_the_last_state_of_a_stopped_training_and_ends(training: Path) -> None:
    last = watched(training).rsplit("digits_impaired · ppo", 1)[1]

    assert " · stopped · iteration 3/100 · " in last
    assert "slots   iteration 3, environment 3" in last
    assert last.splitlines()[-1].endswith("teach has stopped after iteration 3 of 100")
    assert "slots   iteration 3, environment 1" in watched(training, env=1)


def test_watch_command_without_a_terminal_prints_one_line_per_iteration(
    training: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["watch", str(training)])

    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[:-1]] == [f"iteration {number}/100" for number in (1, 2, 3)]
    assert lines[-1].endswith("has stopped after iteration 3 of 100")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "esper watch needs a run's directory as its first word"),
        (["nowhere"], "there is no run directory 'nowhere'"),
        (["."], "'.' is not a run's directory"),
        (["RUN", "--env", "4"], "environment 4 is not in this run; it has 4, numbered from 0"),
    ],
)
def test_watch_command_with_invalid_arguments_ends_with_a_one_sentence_error(
    words: list[str],
    sentence: str,
    training: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: Refused,
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert sentence in refused("watch", *(training if word == "RUN" else word for word in words))


# --- resumed runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_terminal", [False, True])
def test_watch_command_shows_the_new_iterations_of_a_run_resumed_from_an_earlier_checkpoint(
    is_terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resume a run from iteration 1 after an alert in iteration 2; write iterations 2 and 3."""
    first = RunWriter(tmp_path / "teach")
    writers, file = [first], io.StringIO()

    def write(number: int, *rows: Row) -> None:
        with writers[-1].iteration(number):
            for row in rows:
                writers[-1].emit(row)

    write(0, fake_training.run_row())
    write(1, *fake_training.iteration_rows(1))
    with first.checkpoint() as kept:
        pass
    write(2, *fake_training.iteration_rows(2), fake_training.alert_row("kl_high", 2))

    def go_on(seconds: float) -> None:
        if len(writers) == 1:
            first.close()
            writers.append(RunWriter(tmp_path / "teach", resume_from=kept))
            write(2, *fake_training.iteration_rows(2))
            write(3, *fake_training.iteration_rows(3))
        else:
            writers[1].close()

    monkeypatch.setattr("esper.scripts.watch_command.time.sleep", go_on)
    console = Console(file=file, force_terminal=is_terminal, color_system=None, width=80, height=24)
    watch(open_run(tmp_path / "teach"), WatchConfig(), console)

    if is_terminal:
        last = file.getvalue().rsplit("digits_impaired", 1)[1]
        assert "iteration 3/100" in last
        assert "alerts  none open" in last
        return
    shown = [line.split("  ")[0] for line in file.getvalue().splitlines()]
    assert [line.partition(" in ")[0] for line in shown[:-1]] == [
        *("iteration 1/100", "iteration 2/100", "warning kl_high raised"),
        *("iteration 2/100", "iteration 3/100"),
    ]
    assert shown[-1].endswith("has stopped after iteration 3 of 100")
