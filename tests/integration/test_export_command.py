"""``esper export`` on finished, running and killed runs."""

import signal
import struct
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from esper.karn.run import read_rows
from esper.leyline.rows import EpisodeRow, Row, RunRow, UpdateRow
from esper.nissa.writer import RunWriter
from esper.scripts import cli, export_command
from tests.integration.training import Refused, sentence_of
from tests.karn import fake_run
from tests.nissa.event_files import points_expected, points_in

ITERATIONS = 4
SECONDS = 600.0
"""Timeout of export tests in seconds."""


def rows_of(number: int) -> list[Row]:
    """Return the telemetry rows of one training iteration."""
    unknown = {"mean_return": None, "evaluation_score": 40.5} if number == 2 else {}
    return [fake_run.episode_row(number - 1), replace(fake_run.update_row(number), **unknown)]


def write(directory: Path, iterations: int = ITERATIONS) -> Path:
    with RunWriter(directory) as writer:
        writer.emit(fake_run.run_row("mine", iterations=ITERATIONS))
        for number in range(1, iterations + 1):
            for row in rows_of(number):
                writer.emit(row)
    return directory


def begin(writer: RunWriter) -> None:
    """Write the run row and the telemetry rows of the first iteration."""
    for row in [fake_run.run_row("mine", iterations=ITERATIONS), *rows_of(1)]:
        writer.emit(row)
    writer.flush()


def all_points(directory: Path) -> list[tuple[Any, ...]]:
    """Return all metric points that an export of the run must contain."""
    (run,) = read_rows(directory, RunRow)
    return points_expected(run, [*read_rows(directory, UpdateRow), *read_rows(directory, EpisodeRow)])


def command(*words: str | Path) -> list[str]:
    """Return a command line that runs ``esper`` from the sources under test."""
    return [sys.executable, "-c", "from esper.scripts.cli import main; main()", *map(str, words)]


# --- without --follow -------------------------------------------------------------------------------


def test_export_writes_all_rows_of_a_finished_run_and_a_second_export_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Refused
) -> None:
    run = write(tmp_path / "run")

    cli.main(["export", str(run)])

    out = run / "export" / "tensorboard"
    assert capsys.readouterr().out.splitlines() == [
        f"exporting {run}; see it with: tensorboard --logdir {out}",
        "rows exported: 4 of update, 4 of episode; the run has finished",
    ]
    assert "is not empty; an export goes into a directory of its own" in refused("export", run)
    assert points_in(out) == all_points(run)


def test_export_with_follow_ends_after_the_last_row_of_a_stopped_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(tmp_path / "run", iterations=2)

    cli.main(["export", str(run), "--out", str(tmp_path / "out"), "--follow"])

    assert points_in(tmp_path / "out") == all_points(run)
    assert "2 of update, 2 of episode; the run has stopped before its end" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "needs a run's directory as its first word"),
        (["nowhere"], "there is no run directory 'nowhere'"),
        (["RUN", "--project", "mine"], "project is read by trackio and wandb only"),
    ],
)
def test_export_with_invalid_arguments_ends_with_a_one_sentence_error(
    words: list[str], sentence: str, tmp_path: Path, refused: Refused
) -> None:
    run = write(tmp_path / "run")
    assert sentence in refused("export", *(run if word == "RUN" else word for word in words))
    assert not (run / "export").exists()


def test_export_to_a_full_disk_ends_with_a_one_sentence_error(
    tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replace the event file by ``/dev/full``, which cannot be flushed."""
    run = write(tmp_path / "run")
    original = Path.open

    def open_full(path: Path, mode: str = "r") -> Any:
        return original(Path("/dev/full"), "wb") if mode == "xb" else original(path, mode)

    monkeypatch.setattr(Path, "open", open_full)
    said = refused("export", run)
    assert "the export cannot be written: No space left on device" in said


# --- with --follow ----------------------------------------------------------------------------------


def exported_iterations(out: Path) -> set[int]:
    """Return the iterations exported so far, or none if the last record in the event file is incomplete."""
    try:
        return {point.step for point in points_in(out) if point.tag.startswith("update/")}
    except (AssertionError, OSError, ValueError, struct.error):
        return set()


@pytest.mark.parametrize(
    ("end", "iterations", "sentence"),
    [("finished", 4, "the run has finished"), ("killed", 3, "the run has stopped before its end")],
)
def test_export_with_follow_exports_new_iterations_until_the_run_ends(
    end: str,
    iterations: int,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Write one iteration between two polls of the exporter, then close or kill the writer."""
    run, out = tmp_path / "run", tmp_path / "out"
    writer = RunWriter(run)
    begin(writer)
    numbers = iter(range(2, iterations + 1))

    def go_on(seconds: float) -> None:
        if number := next(numbers, None):
            assert exported_iterations(out) == set(range(1, number))
            for row in rows_of(number):
                writer.emit(row)
            writer.flush()
        elif end == "finished":
            writer.close()
        else:
            # A telemetry row in the buffer of a killed writer is lost.
            writer.emit(fake_run.update_row(4))
            # Releasing the writer lock simulates a killed process, whose locks the kernel releases.
            writer._lock.release()

    monkeypatch.setattr("time.sleep", go_on)
    cli.main(["export", str(run), "--out", str(out), "--follow"])

    assert points_in(out) == all_points(run)
    said = capsys.readouterr()
    exported = f"rows exported: {iterations} of update, {iterations} of episode; {sentence}"
    assert (said.out.splitlines()[-1], said.err) == (exported, "")


@pytest.mark.parametrize("end", ["written", "killed", "interrupted"])
def test_export_with_follow_waits_until_the_run_row_is_written(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    writer = RunWriter(run)
    looks: list[float] = []

    def go_on(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) < 3:
            return
        if end == "interrupted":
            raise KeyboardInterrupt
        if end == "written":
            begin(writer)
        # Releasing the writer lock simulates a killed process, whose locks the kernel releases.
        writer._lock.release()

    monkeypatch.setattr("time.sleep", go_on)
    words = ["export", str(run), "--out", str(out), "--follow"]
    if end == "killed":
        assert "has not written its own row" in sentence_of(capsys, *words)
        assert not out.exists()
    else:
        cli.main(words)
        exported = {
            "written": "rows exported: 1 of update, 1 of episode; the run has stopped before its end",
            "interrupted": "rows exported: none yet; interrupted",
        }
        assert capsys.readouterr().out.splitlines()[-1] == exported[end]
    assert looks == [export_command.POLL_SECONDS] * 3


def test_ctrl_c_ends_export_with_follow_without_an_error(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    with RunWriter(run) as writer:
        begin(writer)
        words = command("export", run, "--out", out, "--follow")
        export = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + SECONDS
        while exported_iterations(out) != {1}:
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.02)
        export.send_signal(signal.SIGINT)
        said, complaints = export.communicate(timeout=SECONDS)

    assert (export.returncode, complaints) == (0, "")
    assert said.splitlines()[-1] == "rows exported: 1 of update, 1 of episode; interrupted"


def test_export_without_follow_exports_a_running_run_once_and_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with RunWriter(run) as writer:
        begin(writer)
        cli.main(["export", str(run)])

    assert exported_iterations(run / "export" / "tensorboard") == {1}
    assert "the run is not over, and --follow would wait for its end" in capsys.readouterr().out


def test_export_with_follow_ends_with_an_error_if_the_run_is_resumed_from_an_earlier_checkpoint(
    tmp_path: Path,
) -> None:
    """Rewrite iteration 2 and write iteration 3 between two polls of the exporter."""
    run = tmp_path / "run"

    def write(writer: RunWriter, number: int) -> None:
        with writer.iteration(number):
            for row in rows_of(number):
                writer.emit(row)

    with RunWriter(run) as writer:
        with writer.iteration(0):
            writer.emit(fake_run.run_row("mine", iterations=ITERATIONS))
        write(writer, 1)
        with writer.checkpoint() as mark:
            pass
        write(writer, 2)
        read = partial(export_command.new_rows, export_command.open_run(run), UpdateRow, {})
        assert len(read()) == 2
        assert read() == []
    with RunWriter(run, resume_from=mark) as writer:
        write(writer, 2)
        write(writer, 3)

    with pytest.raises(export_command.ExportError, match="resumed from an earlier point"):
        read()


# --- trackers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tool", "file", "sentence"),
    [
        ("trackio", "growth.db", "project 'growth' already holds a run 'mine'"),
        ("wandb", "wandb/offline-run-*/run-*.wandb", "is not empty"),
    ],
)
def test_export_to_an_experiment_tracker_writes_every_metric_and_a_second_export_is_refused(
    tool: str, file: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the trackers in child processes, because trackers leave threads and settings behind."""
    pytest.importorskip(tool, reason=f"{tool} is not installed; it is no part of esper[dev]")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    run, out = write(tmp_path / "run"), tmp_path / "out"
    words = command("export", run, "--to", tool, "--out", out, "--project", "growth")
    first, second = (
        subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False) for _ in range(2)
    )

    assert first.returncode == 0, first.stderr
    assert second.returncode == 2
    assert sentence in second.stderr
    (written,) = out.glob(file)
    assert [point.tag for point in all_points(run) if point.tag.encode() not in written.read_bytes()] == []
