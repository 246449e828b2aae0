"""Terminal, list of runs, web page, report, charts and alerts show the same numbers for a run."""

import io
import json
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from esper.karn.drawing.picture import numeric_columns
from esper.karn.figures import FIGURES, figure_named
from esper.karn.headline import conclude
from esper.karn.page.sections import head, render_report
from esper.karn.questions.honesty import honesty
from esper.karn.questions.learning_curves import growth, improvement
from esper.karn.questions.policy_health import health
from esper.karn.run import Run, open_run
from esper.karn.runs import done_text, list_lines, listed, overview, progress
from esper.karn.screen import screen
from esper.karn.terminal import TerminalView
from esper.leyline.rows import EpisodeRow, Row, UpdateRow
from esper.leyline.thresholds import CORRELATED_EPISODES
from esper.nissa.alert_monitor import AlertMonitor
from esper.nissa.writer import RunWriter
from esper.scripts import cli
from tests.karn import made_run
from tests.karn.page import read_page
from tests.karn.serving import Client, facts

ITERATIONS = 2
SCORES, TWINS = (20.0, 21.0, 61.0, 9.0), (10.0, 11.0, 33.0, 2.0)
"""Validation scores and twin scores by environment; the episode of the last environment was ended early.

Over the first three environments the mean score is 34 and the mean twin score 18 (medians: 21 and 11).
"""


def training() -> Iterator[Row]:
    for row in made_run.training_rows(iterations=ITERATIONS, envs=4, horizon=5):
        if isinstance(row, EpisodeRow) and row.iteration == ITERATIONS:
            yield replace(
                row,
                val_score=SCORES[row.env],
                twin_val_score=TWINS[row.env],
                params=500 + row.env,
                ended_by="governor" if row.env == 3 else "horizon",
            )
        elif isinstance(row, UpdateRow) and row.iteration == ITERATIONS:
            yield replace(row, val_score=34.0, params=501.0, broken_episodes=1)
        else:
            yield row


@contextmanager
def running(directory: Path, rows: Iterable[Row]) -> Iterator[Path]:
    """Yield the directory of a run that started ten seconds ago and is still being written."""
    clock = iter([0.0])
    with RunWriter(directory, clock=lambda: next(clock, 10.0)) as writer:
        for row in rows:
            writer.emit(row)
        writer.flush()
        yield directory


def heads(run: Path) -> list[dict[str, str]]:
    """Return the values shown in the headers of the web page and of the report of a run."""
    report = read_page(head(open_run(run), run.name, served=False))
    return [facts(Client(run.parent).part(run.name, "head").html), facts(report)]


def lines_of(directory: Path) -> list[str]:
    """Return the lines that the terminal view prints for a run."""
    file = io.StringIO()
    with TerminalView(directory, Console(file=file)) as view:
        view.refresh()
    return file.getvalue().splitlines()


def screen_of(directory: Path) -> str:
    """Return the text of a run's terminal screen, followed by its row in the output of ``esper runs``."""
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(screen(open_run(directory), 100))
    lines = [console.export_text(), *list_lines([listed(directory)], width=0)]
    return " ".join(" ".join(lines).split())


def listed_for_machines(directory: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    cli.main(["runs", str(directory), "--json"])
    (found,) = json.loads(capsys.readouterr().out)
    return found


# --- progress ---------------------------------------------------------------------------------------


def test_progress_of_a_run_with_two_episodes_is_counted_in_epochs_of_both_episodes(tmp_path, capsys):
    """Expect 0.4 steps/s and 30 s remaining, because 4 of 16 steps (epochs) took ten seconds."""
    row = replace(made_run.run_row(horizon=8), config={"episodes": 2})
    going = made_run.Episode(0, 0, 3, 8, random.Random(1)).live(epochs=4)
    with running(tmp_path / "run", [row, *going]) as run:
        found = progress(open_run(run))
        assert (done_text(found), found.seconds_left) == ("epoch 4/16", pytest.approx(30.0))
        for shown in heads(run):
            assert (shown["progress"], shown["left"], shown["pace"]) == (
                *("epoch 4/16", "0:00:30", "0.4 steps/s"),
            )
        assert "epoch 4/16" in Client(tmp_path).rows()["run"].text
        assert "running · epoch 4/16 · 0:00:10 · left 0:00:30 · 0.4 steps/s" in screen_of(run)
        machine = listed_for_machines(run, capsys)
        assert (machine["done"], machine["total"], machine["seconds_left"]) == (4, 16, pytest.approx(30.0))


def test_progress_of_a_policy_training_is_counted_in_iterations(tmp_path):
    """Three of 5 iterations remain and take 4 seconds each; 40 epochs in ten seconds are 4 steps/s."""
    rows = list(training())
    rows[0] = replace(rows[0], iterations=5)
    with running(tmp_path / "run", rows) as run:
        for shown in heads(run):
            assert (shown["progress"], shown["left"], shown["pace"]) == (
                *("iteration 2/5", "0:00:12", "4 steps/s"),
            )
        assert "running · iteration 2/5 · 0:00:10 · left 0:00:12 · 4 steps/s" in screen_of(run)
        assert lines_of(run)[-1].startswith("iteration 2/5  left 0:00:12  ")


# --- scores -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return open_run(made_run.write(tmp_path_factory.mktemp("runs") / "run", training()))


def test_score_of_an_iteration_is_the_mean_over_episodes_that_reached_the_horizon(run):
    found = overview(run)
    assert (found.score, found.twin, found.lead, found.params) == (34.0, 18.0, 16.0, 501.0)
    for shown in heads(run.path):
        assert (shown["score"], shown["twin"], shown["lead"], shown["params"]) == (
            *("34.0", "18.0", "+16.0", "×2.88"),
        )
    assert "  score 34.0  twin 18.0  params 501  " in lines_of(run.path)[-1]
    assert "34.0 18.0" in screen_of(run.path)
    last = {name: values[-1] for name, values in growth(run).values.items()}
    assert (last["score"], last["twin"], last["parameters"]) == (34.0, 18.0, 501.0)
    assert (last["lowest"], last["highest"], last["episodes"]) == (9.0, 61.0, 4)
    assert improvement(run).last("score") == 34.0
    assert "score 34.0" in figure_named("growth").answer(run).svg
    fact = next(fact for fact in conclude(run).facts if fact.name == "validation, iteration 2")
    assert fact.value.startswith("34.0 ± ")
    assert fact.note.startswith("twin 18.0, +16.0 ± ")
    assert "One episode of iteration 2 broke down and is not counted." in conclude(run).sentences


def test_unknown_scores_and_settings_are_shown_as_dashes_on_web_page_and_report(tmp_path):
    """Use a training with a null setting, in which no episode of the last iteration reached its horizon."""
    rows = [replace(row, ended_by="governor") if isinstance(row, EpisodeRow) else row for row in training()]
    rows[0] = replace(rows[0], config={"gamma": None})
    made_run.write(tmp_path / "run", rows)
    for shown in heads(tmp_path / "run"):
        assert (shown["score"], shown["twin"], shown["lead"], shown["params"]) == ("–", "–", "–", "–")
    client = Client(tmp_path)
    cells = [cell.text for cell in client.rows()["run"].all("td")]
    assert cells[8:12] == ["–", "–", "–", "–"]
    assert client.part("run", "configuration").html.one("dd").text == "–"
    for figure in FIGURES:
        figure.answer(open_run(tmp_path / "run"))


def test_unfinished_iteration_does_not_change_the_scores_shown_for_a_killed_training(run, tmp_path):
    """Use a killed training whose third iteration has two finished episodes and an unfinished one."""
    rows = list(training())
    rows[0] = replace(rows[0], iterations=ITERATIONS + 1)
    for env, epochs in ((0, None), (1, None), (2, 2)):
        episode = made_run.Episode(env, ITERATIONS, 3, 5, random.Random(env), rewarded=True)
        rows += episode.live(epochs=epochs)
    killed = open_run(made_run.write(tmp_path / "run", rows))
    assert growth(killed).values == growth(run).values
    assert improvement(killed).values == improvement(run).values
    assert conclude(killed).headline == conclude(run).headline
    assert (overview(killed).score, done_text(progress(killed))) == (34.0, "iteration 2/3")


def test_report_of_a_training_killed_in_its_first_iteration_states_that_there_is_no_result(tmp_path):
    rows = [row for row in training() if getattr(row, "iteration", 1) == 1 and not isinstance(row, UpdateRow)]
    killed = open_run(made_run.write(tmp_path / "run", rows))
    assert conclude(killed).headline == "No iteration is done, so there is no result."
    assert conclude(killed).sentences == ["Stopped before its first iteration was done."]
    assert growth(killed) is improvement(killed) is overview(killed).score is None
    for figure in FIGURES:
        figure.answer(killed)


# --- alerts -----------------------------------------------------------------------------------------


def test_reward_alert_and_chart_of_return_and_score_show_the_same_rank_correlation(tmp_path):
    """Use twenty episodes in which a higher return means a higher score but a smaller gain over the twin."""
    rows = made_run.training_rows(iterations=1, envs=CORRELATED_EPISODES, horizon=1, slots=1)
    monitor = AlertMonitor(rows[0])
    raised, written = [], []
    for row in rows:
        if isinstance(row, EpisodeRow):
            ends = {
                "total_reward": row.env * 0.1,
                "val_score": 20.0 + row.env,
                "twin_val_score": 2.0 * row.env,
            }
            row = replace(row, **ends)  # noqa: PLW2901
        written.append(row)
        raised += monitor.take(row)
    (alert,) = (alert for alert in raised if alert.rule == "pays-for-worse")
    found = honesty(open_run(made_run.write(tmp_path / "run", written)))
    assert alert.value == found.rank_correlation == found.recent == pytest.approx(-1.0)
    assert found.gain == "lead"
    assert "rank correlation -1.00" in figure_named("honesty").draw(found, None).svg


@pytest.mark.parametrize(("target", "limit"), [(0.03, 0.06), (0.1, 0.2)])
def test_kl_alert_and_normal_range_of_the_kl_chart_have_the_same_limit(tmp_path, target, limit):
    rows = [replace(row, approx_kl=0.5) if isinstance(row, UpdateRow) else row for row in training()]
    rows[0] = replace(rows[0], config={"iterations": 2, "target_kl": target})
    monitor = AlertMonitor(rows[0])
    raised = [alert for row in rows for alert in monitor.take(row) if alert.rule == "kl"]
    found = open_run(made_run.write(tmp_path / "run", rows))
    (metric,) = (metric for metric in health(found).metrics if metric.name == "approx_kl")
    assert [alert.limit for alert in raised] == [pytest.approx(limit)]
    assert metric.high == pytest.approx(limit)
    assert f"0.5 &gt; {limit:g}" in figure_named("health").answer(found).svg


# --- tables -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cells", "is_number"),
    [
        (["1", "+2.5", "-3", "1,234", "–", ""], True),
        (["61.5 ± 0.8", "<1 %", "12.5 ms", "×25", "4.00 GFLOP", "0:00:12", "3e-07"], True),
        (["5.0 % (-1.0 % to 10.0 %)", "+1.80 (+1.60 to ∞)", "∞"], True),
        (["1", "2 kept"], False),
        (["r0c0"], False),
        (["+0.10 to +0.20"], False),
    ],
)
def test_column_of_an_html_table_is_numeric_if_all_its_cells_are_numeric(cells, is_number):
    assert numeric_columns([[cell] for cell in cells]) == [is_number]


def test_text_columns_of_tables_have_the_css_class_text_on_web_page_and_in_report(tmp_path):
    made_run.write(tmp_path / "run", made_run.run_rows())
    report = read_page(render_report(open_run(tmp_path / "run"))).one("section", id="lanes")
    for lanes in (report, Client(tmp_path).part("run", "lanes").html):
        looks = {cell.text: cell.attributes.get("class") for cell in lanes.one("thead").all("th")}
        assert (looks["slot"], looks["born"], looks["parameters"]) == ("text", None, None)
