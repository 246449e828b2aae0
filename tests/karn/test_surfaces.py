"""One number, one value: what stands for the episodes of an iteration reads the same wherever it is shown."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from esper.karn import notation
from esper.karn.conclusion import conclude
from esper.karn.figures import FIGURES
from esper.karn.page.sections import head
from esper.karn.questions.growth import growth
from esper.karn.questions.improvement import improvement
from esper.karn.questions.overview import overview
from esper.karn.questions.progress import Progress, done_text, progress
from esper.karn.run import open_run
from esper.karn.runs import listed, table_of
from esper.karn.screen import screen
from esper.karn.terminal import TerminalView
from esper.leyline.events import EnvRow, EpisodeRow, EpochRow, Row, UpdateRow
from esper.nissa.journal import IterationJournal
from esper.nissa.writer import RunWriter
from esper.scripts import cli
from tests.karn import fake_run, fake_training

ITERATIONS = 2
SCORES, TWINS = (20.0, 21.0, 61.0, 9.0), (10.0, 11.0, 33.0, 2.0)
"""Of the environments in the last iteration; the episode of the last one broke down.

Of the three that lasted, the means are 34 and 18; medians would be 21 and 11, means of all four 27.8 and 14.
"""


def rows() -> list[Row]:
    numbers = range(1, ITERATIONS + 1)
    made = [_changed(row) for number in numbers for row in fake_training.iteration_rows(number)]
    return [fake_training.run_row(iterations=ITERATIONS), *made]


def _changed(row: Row) -> Row:
    """The episodes of the last iteration have the scores above."""
    if isinstance(row, EpisodeRow) and row.iteration == ITERATIONS:
        scores = {"val_score": SCORES[row.env], "twin_val_score": TWINS[row.env]}
        ended_by = "governor" if row.env == 3 else "horizon"
        return replace(row, **scores, params=500 + row.env, ended_by=ended_by)
    if isinstance(row, UpdateRow) and row.iteration == ITERATIONS:
        return replace(row, val_score=34.0, params=501.0, broken_episodes=1)
    return row


def lines_of(directory: Path) -> list[str]:
    """What is told of a run without a terminal."""
    file = io.StringIO()
    with TerminalView(directory, Console(file=file)) as view:
        view.refresh()
    return file.getvalue().splitlines()


def screen_of(directory: Path) -> list[str]:
    """The lines of a run's screen."""
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(screen(open_run(directory), 100))
    return console.export_text().splitlines()


def row_of_list(directory: Path) -> list[str]:
    """The words of the line that ``esper runs`` has for a run."""
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(table_of([listed(directory)]))
    return console.export_text().splitlines()[-1].split()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "run"
    with RunWriter(directory) as writer:
        for row in rows():
            writer.emit(row)
    return directory


def test_the_terminal_and_its_log_show_the_mean_of_the_episodes_that_lasted(run: Path) -> None:
    _, last = lines_of(run)
    assert "  score 34.0  twin 18.0  params 501  " in last

    facts = [line.split() for line in screen_of(run)]
    assert [line[:2] for line in facts if line[0] in ("score", "twin", "params")] == [
        ["score", "34.0"],
        ["twin", "18.0"],
        ["params", "501"],
    ]
    assert ["lead", "+16.0"] in [line[2:4] for line in facts]


def test_the_page_and_the_list_show_the_same(run: Path) -> None:
    found = overview(open_run(run))
    assert (found.score, found.twin, found.lead, found.params) == (34.0, 18.0, 16.0, 501.0)
    assert [cell for cell in row_of_list(run) if cell in ("34.0", "18.0", "501")] == ["34.0", "18.0", "501"]


def test_the_figures_and_the_report_show_the_same(run: Path) -> None:
    opened = open_run(run)
    point = growth(opened).points[-1]
    assert (point.score, point.twin, point.params) == (34.0, 18.0, 501.0)
    assert (point.low, point.high, point.episodes) == (9.0, 61.0, 4)
    assert improvement(opened).points[-1].score == 34.0
    (figure,) = (figure for figure in FIGURES if figure.key == "growth")
    assert "score 34.0" in figure.answer(opened).svg
    assert "twin 18.0" in figure.answer(opened).svg
    fact = next(fact for fact in conclude(opened).facts if fact.name == "validation, iteration 2")
    assert fact.value.startswith("34.0 ± ")
    assert fact.note.startswith("twin 18.0, +16.0 ± ")


def test_an_iteration_of_which_no_episode_lasted_has_no_score(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as writer:
        for row in rows():
            is_last = isinstance(row, EpisodeRow) and row.iteration == ITERATIONS
            writer.emit(replace(row, ended_by="governor") if is_last else row)

    run = open_run(tmp_path / "run")
    found = overview(run)
    assert (found.score, found.twin, found.lead, found.params) == (None, None, None, None)
    for figure in FIGURES:
        figure.answer(run)


# --- a training that was killed within an iteration ----------------------------------------------------


def killed_within(directory: Path, number: int) -> Path:
    """All iterations before are complete; of this one two of four episodes are over, a third is under way."""
    with RunWriter(directory) as writer:
        with writer.iteration(number - 1):
            writer.emit(fake_training.run_row(iterations=ITERATIONS + 1))
            for row in rows()[1:]:
                if isinstance(row, EnvRow | UpdateRow) and (row.iteration or 0) < number:
                    writer.emit(row)
        journal = IterationJournal(directory, "standard")
        journal.begin(writer.began)
        collected = [row for row in fake_training.iteration_rows(number) if not isinstance(row, UpdateRow)]
        journal.take(number, 0, [row for row in collected if isinstance(row, EnvRow) and row.env < 2])
        third = [row for row in collected if isinstance(row, EpochRow) and row.env == 2]
        journal.take(number, 2, third[:1])
    return directory


def test_half_an_iteration_changes_nothing_of_what_a_killed_training_came_to(
    run: Path, tmp_path: Path
) -> None:
    killed = open_run(killed_within(tmp_path / "run", ITERATIONS + 1))
    assert len(killed.rows(EpisodeRow, f"episode = {ITERATIONS}")) == 2
    assert growth(killed).points == growth(open_run(run)).points
    assert improvement(killed).points == improvement(open_run(run)).points
    assert conclude(killed).headline == conclude(open_run(run)).headline
    broken = "One episode of iteration 2 broke down and is not counted."
    assert broken in conclude(open_run(run)).sentences
    assert broken in conclude(killed).sentences
    found = overview(killed)
    assert (found.score, found.twin, found.params) == (34.0, 18.0, 501.0)
    assert done_text(found.progress) == "iteration 2/3"


def test_a_training_killed_within_its_first_iteration_has_come_to_nothing_yet(tmp_path: Path) -> None:
    killed = open_run(killed_within(tmp_path / "run", 1))
    assert len(killed.rows(EpisodeRow)) == 2
    assert conclude(killed).headline == "No iteration is done, so there is no result."
    assert conclude(killed).sentences == ["Stopped before its first iteration was done."]
    assert growth(killed) is None
    assert improvement(killed) is None
    found = overview(killed)
    assert (found.score, found.twin, found.params) == (None, None, None)
    for figure in FIGURES:
        figure.answer(killed)


# --- how far, how fast, how much longer ------------------------------------------------------------------


def open_writer(directory: Path) -> RunWriter:
    """A writer on whose clock a row takes a quarter of a second."""
    ticks = iter(range(100_000))
    return RunWriter(directory, clock=lambda: next(ticks) / 8)


def test_terminal_list_and_page_agree_on_a_run_of_two_episodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second of two episodes of 8 epochs has finished 4; what is left goes on as all did so far."""
    with open_writer(tmp_path / "run") as writer:
        writer.emit(fake_run.run_row(episodes=2))
        for row in fake_run.episode(0):
            writer.emit(row)
        for row in fake_run.episode(1):
            if isinstance(row, EnvRow) and row.epoch <= 4:
                writer.emit(row)
        writer.flush()
        found = progress(open_run(tmp_path / "run"))
        assert (found.unit, found.done, found.total, found.state) == ("epoch", 12, 16, "running")
        assert found.seconds_left == pytest.approx(found.seconds / 12 * 4)
        assert found.steps_per_second == pytest.approx(12 / found.seconds)
        assert_all_say(found, "epoch 12/16", tmp_path / "run", capsys)


def test_terminal_list_and_page_agree_on_a_training_in_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Iterations of 12.5 s: 98 are left."""
    with open_writer(tmp_path / "run") as writer:
        writer.emit(fake_training.run_row())
        for row in [*fake_training.iteration_rows(1), *fake_training.iteration_rows(2)]:
            writer.emit(row)
        writer.flush()
        found = progress(open_run(tmp_path / "run"))
        assert (found.unit, found.done, found.total, found.state) == ("iteration", 2, 100, "running")
        assert found.seconds_left == 98 * 12.5
        assert_all_say(found, "iteration 2/100", tmp_path / "run", capsys)
        assert lines_of(tmp_path / "run")[-1].startswith("iteration 2/100  left 0:20:25  ")


def assert_all_say(found: Progress, done: str, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The screen, the list, the list for machines, the figure of report and page, and the page's list."""
    left, pace = notation.clock(found.seconds_left), notation.significant(found.steps_per_second)
    line = f" · running · {done} · {notation.clock(found.seconds)} · left {left} · {pace} steps/s"
    assert screen_of(directory)[0].rstrip().endswith(line)
    assert done in " ".join(row_of_list(directory))
    cli.main(["runs", str(directory), "--json"])
    (machine,) = json.loads(capsys.readouterr().out)
    assert f"{machine['unit']} {machine['done']}/{machine['total']}" == done
    for name in ("seconds_left", "steps_per_second"):
        assert machine[name] == getattr(found, name)
    (figure,) = (figure for figure in FIGURES if figure.key == "progress")
    assert figure.answer(open_run(directory)).caption.endswith(line)
    page = head(open_run(directory), "run", served=True)
    assert all(f"<b>{text}</b>" in page for text in (done, left, f"{pace} steps/s"))
