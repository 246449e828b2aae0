"""Reports of unfinished runs, and HTML escaping and self-containment of reports."""

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from esper.files.row_files import TELEMETRY
from esper.files.writer_lock import WriterLock
from esper.karn.headline import conclude
from esper.karn.page.sections import render_report
from esper.leyline.rows import EpisodeRow, Row, UpdateRow
from tests.karn import fake_run, made_run
from tests.karn.page import read_page
from tests.karn.test_report import page_of, pairs, training, write
from tests.rows import change

# --- unfinished runs --------------------------------------------------------------------------------


def until(epoch: int, episode: int = 0) -> list[Row]:
    """Return the telemetry rows of an unfinished episode up to a given epoch."""
    rows = fake_run.episode(episode)
    return [row for row in rows if getattr(row, "epoch", 0) <= epoch and not isinstance(row, EpisodeRow)]


@pytest.mark.parametrize(
    ("rows", "running", "stopped", "expected"),
    [
        (
            [fake_run.run_row()],
            "Still running: no epoch is done yet.",
            "Stopped before its first epoch was done.",
            "No episode is finished, so there is no result.",
        ),
        (
            [fake_run.run_row(), *until(5)],
            "Still running: after epoch 5 of 8.",
            "Stopped after epoch 5 of 8.",
            "After epoch 5 of 8 the score is 47.5, 28.0 points above its twin that does not grow.",
        ),
        (
            [fake_run.run_row(episodes=3), *fake_run.episode(), *until(2, episode=1)],
            "Still running: after epoch 10 of 24.",
            "Stopped after epoch 10 of 24.",
            "It reached 61.5 on validation, 39.5 points above its twin that did not grow.",
        ),
        (
            [fake_run.run_row(episodes=3), *fake_run.episode()],
            "Still running: after epoch 8 of 24.",
            "Stopped after epoch 8 of 24.",
            "It reached 61.5 on validation, 39.5 points above its twin that did not grow.",
        ),
        (
            [fake_run.run_row(iterations=4)],
            "Still running: no iteration is done yet.",
            "Stopped before its first iteration was done.",
            "No iteration is done, so there is no result.",
        ),
        (
            list(training(4, done=3)),
            "Still running: after iteration 3 of 4.",
            "Stopped after iteration 3 of 4.",
            "The best policy, that of iteration 2, scored 44.5 in its evaluation; the 2 episodes of"
            " iteration 3 reached 50.0 ± 63.5 on validation, 25.0 ± 63.5 points above their twins that did"
            " not grow.",
        ),
    ],
)
def test_report_states_after_which_epoch_or_iteration_a_run_is_running_or_was_stopped(
    tmp_path: Path, rows: list[Row], running: str, stopped: str, expected: str
) -> None:
    run = write(tmp_path / "run", rows)
    found = conclude(run)
    assert (found.sentences[0], found.headline) == (stopped, expected)
    # The test holds the writer lock, as a running training does.
    lock = WriterLock(run.path / TELEMETRY)
    found = conclude(run)
    assert (found.sentences[0], found.headline) == (running, expected)
    lock.release()


def test_report_of_a_run_killed_during_counterfactual_measurements_omits_slot_interactions(
    tmp_path: Path,
) -> None:
    run = write(tmp_path / "run", [fake_run.run_row(), *until(5), fake_run.counterfactual_row(5)])
    page = page_of(run)
    assert page.one("section", id="interactions").one(class_="nothing")
    assert page.one(class_="state").text == "stopped"


# --- HTML -------------------------------------------------------------------------------------------


def test_names_of_run_settings_slots_and_alerts_in_a_report_are_html_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(\"x\")</script><b onclick='x'>&amp;"
    names = dict.fromkeys(("name", "task", "controller", "started", "git_revision"), evil)
    maps = {"config": {evil: evil}, "versions": {evil: evil}, "hardware": {evil: [evil]}}
    row, *rows = made_run.training_rows(iterations=2, envs=2, horizon=12)
    change(row, **names, **maps, slots=[evil, "r0c1", "r0c2"], blueprints=[evil] * 13)
    for update in rows:
        if isinstance(update, UpdateRow):
            change(update, phase_ms={evil: 1.0}, reward_terms={evil: 1.0})
    alert = replace(fake_run.alert_row(evil), hint=evil, scope=evil)
    run = write(tmp_path / "run", [row, *rows, alert])
    page = read_page(render_report(run, [run], reproduction=evil))
    assert not list(page.all("script"))
    assert not list(page.all(onclick="x"))
    assert evil in page.one("head").one("title").text
    assert page.one("h1").text == evil
    assert pairs(page.one("section", id="configuration")) == {evil: evil}
    assert page.one("pre").text == evil
    assert evil in page.one("section", id="diary").text


def test_html_report_loads_no_external_resources(tmp_path: Path) -> None:
    trained = render_report(write(tmp_path / "run", training()))
    page = read_page(trained)
    ids = [node.attributes["id"] for node in page.all() if "id" in node.attributes]
    assert len(ids) == len(set(ids))
    assert not [
        node.name for node in page.all() if node.name in ("script", "link", "img", "iframe", "object")
    ]
    addressed = [
        (node.name, key, value)
        for node in page.all()
        for key, value in node.attributes.items()
        if key in ("src", "href", "xlink:href", "srcset", "data", "action") and not value.startswith("#")
    ]
    assert addressed == []
    assert not re.search(r"@import|url\(", trained)
    assert re.findall(r"\bon\w+=", trained) == []
    assert set(re.findall(r"https?://[^\s\"'<]+", trained)) <= {"http://www.w3.org/2000/svg"}
    assert "width=device-width" in trained
    assert "prefers-color-scheme:dark" in trained
