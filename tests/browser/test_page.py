"""The page in a real browser: it follows a run, shows what the rows say, and works without a mouse."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from esper.karn.drawing.picture import Picture
from esper.karn.figures import FIGURES
from esper.karn.questions.episodes import EpisodeKey
from esper.karn.run import open_run
from esper.karn.serve.folder import SECONDS_BETWEEN_LOOKS
from esper.leyline.events import EpochRow
from esper.nissa.encoding import RowEncoder
from esper.nissa.writer import RunWriter
from tests.browser.conftest import Server
from tests.karn import fake_run
from tests.karn.serving import lines_of, training, write_run
from tests.rows import change

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect

EPISODE, TRAINING = "episode", "deep/training"


@pytest.fixture(scope="module", autouse=True)
def written(runs: Path) -> None:
    """Two runs that are finished."""
    write_run(runs / EPISODE)
    write_run(runs / TRAINING, training(3), iterations=3, controller="ppo")


@pytest.fixture
def live(page, runs: Path, tmp_path: Path) -> Iterator[RunWriter]:
    """A run that has begun."""
    with RunWriter(runs / "live") as writer:
        writer.emit(fake_run.run_row("live"))
        writer.emit(fake_run.epoch_row(0))
        writer.flush()
        yield writer
    move_away(page, runs / "live", tmp_path)


def move_away(page, run: Path, place: Path) -> None:
    """In one step, so that nobody reads half a run, and when the page asks for nothing of it any more.

    The server looks anew after a while; a page that is opened before that would ask for what is gone.
    """
    page.close()
    run.rename(place / run.name)
    time.sleep(2 * SECONDS_BETWEEN_LOOKS)


def row_of(page, name: str):
    return page.locator(f'tr[data-name="{name}"]')


def open_page(page, server, name: str | None = None) -> None:
    """The list, or the page of a run that is in it."""
    page.goto(server.url)
    if name is not None:
        row_of(page, name).get_by_role("link").click()
        expect(page.locator("h1")).to_have_text(name)


def fact(page, label: str):
    return page.locator(f'.fact[data-fact="{label}"] b')


def panel(page, key: str):
    return page.locator(f'[data-panel="{key}"]')


def picture_of(run: Path, key: str, episode: EpisodeKey | None = None) -> Picture:
    (figure,) = (figure for figure in FIGURES if figure.key == key)
    picture = figure.answer(open_run(run), episode)
    assert picture is not None
    return picture


def table_in(page, key: str) -> list[list[str]]:
    rows = panel(page, key).locator("tbody tr").all()
    return [row.locator("td").all_inner_texts() for row in rows]


# --- live -----------------------------------------------------------------------------------------


def test_a_run_appears_in_the_list_and_its_numbers_follow_without_a_reload(page, server, runs, tmp_path):
    open_page(page, server)
    expect(row_of(page, EPISODE)).to_contain_text("61.5")
    expect(page.locator("#connection")).to_have_text("live")
    page.evaluate("window.isTheSamePage = true")

    with RunWriter(runs / "late") as writer:
        writer.emit(fake_run.run_row("late"))
        writer.emit(fake_run.epoch_row(1))
        writer.flush()
        expect(row_of(page, "late")).to_contain_text("running")
        expect(row_of(page, "late")).to_contain_text("14.0")
        writer.emit(fake_run.epoch_row(2))
        writer.flush()
        expect(row_of(page, "late")).to_contain_text("22.5")

    expect(row_of(page, "late")).to_contain_text("stopped")
    (runs / "late").rename(tmp_path / "late")
    expect(row_of(page, "late")).to_have_count(0)
    assert page.evaluate("window.isTheSamePage")


def test_the_page_of_a_run_follows_it_to_its_end(page, server, live):
    open_page(page, server, "live")
    page.evaluate("window.isTheSamePage = true")
    expect(fact(page, "progress")).to_have_text("epoch 0/8")
    expect(panel(page, "growth").locator(".chart-title")).to_contain_text("score 10.0")

    _, *rows = fake_run.episode()
    half = next(at for at, row in enumerate(rows) if row == fake_run.epoch_row(4)) + 1
    for row in rows[:half]:
        live.emit(row)
    live.flush()
    expect(fact(page, "progress")).to_have_text("epoch 4/8")
    expect(fact(page, "score")).to_have_text("41.0")
    expect(panel(page, "growth").locator(".chart-title")).to_contain_text("score 41.0")
    expect(panel(page, "lanes").locator("svg")).to_contain_text("conv_light")
    expect(panel(page, "lanes").locator("svg")).not_to_contain_text("norm")

    for row in rows[half:]:
        live.emit(row)
    live.flush()
    expect(fact(page, "progress")).to_have_text("epoch 8/8")
    expect(panel(page, "lanes").locator("svg")).to_contain_text("norm")
    expect(panel(page, "diary")).to_contain_text("conv_heavy germinated in r0c1")
    live.close()
    expect(page.locator(".run-head .state")).to_have_text("finished")
    assert page.evaluate("window.isTheSamePage")


def test_an_alert_stands_on_top_until_it_is_cleared(page, server, live):
    open_page(page, server, "live")
    live.emit(fake_run.alert_row("collapse"))
    live.flush()
    expect(page.locator(".run-head .alerts")).to_contain_text("collapse")

    live.emit(fake_run.alert_row("collapse", "cleared"))
    live.flush()
    expect(page.locator(".run-head .alerts")).not_to_contain_text("collapse")


def test_a_page_that_lost_its_server_goes_on_where_that_comes_back(page, seen, tmp_path):
    write_run(tmp_path / "mine", [fake_run.epoch_row(1)])
    server = Server.start(tmp_path, "--port", "0")
    port = server.url.rpartition(":")[2].strip("/")
    open_page(page, server)
    expect(row_of(page, "mine")).to_contain_text("14.0")

    server.stop()
    expect(page.locator("#connection")).to_have_text("not connected")
    with lines_of(tmp_path / "mine").open("ab") as file:
        file.write(RowEncoder("epoch").line(fake_run.epoch_row(2), t=9.0))
    again = Server.start(tmp_path, "--port", port)

    expect(page.locator("#connection")).to_have_text("live")
    expect(row_of(page, "mine")).to_contain_text("22.5")
    again.stop()
    seen.errors.clear()  # the browser notes that nobody answered


# --- what is shown --------------------------------------------------------------------------------


def test_lanes_and_their_table_are_those_of_the_chosen_episode(page, server, runs):
    open_page(page, server, TRAINING)
    expect(panel(page, "lanes").locator("svg")).to_be_visible()
    panel(page, "lanes").get_by_role("button", name="table").click()
    shown = page.get_by_label("which iteration or episode")

    shown.select_option(label="iteration 2")

    first = picture_of(runs / TRAINING, "lanes", EpisodeKey(0, 1))
    expect(panel(page, "lanes").locator(".caption")).to_have_text(first.caption)
    assert table_in(page, "lanes") == first.rows
    # The lanes hold one bar per stage that a seed went through: the rows say which.
    drawn = panel(page, "lanes").locator("svg")
    for stage in ("training", "blending", "holding", "fossilized"):
        expect(drawn.locator(f".{stage}").first).to_be_attached()
    shown.focus()
    page.keyboard.press("Escape")  # leaves the list of episodes, not the page
    page.keyboard.press("]")
    later = picture_of(runs / TRAINING, "lanes", EpisodeKey(0, 2))
    expect(panel(page, "lanes").locator(".caption")).to_have_text(later.caption)
    assert shown.input_value() == "2"


def test_every_figure_has_its_table(page, server, runs):
    open_page(page, server, EPISODE)
    expect(panel(page, "growth").locator("canvas").first).to_be_visible()

    page.keyboard.press("t")

    expect(panel(page, "growth").locator("tbody tr")).to_have_count(9)
    assert table_in(page, "growth") == picture_of(runs / EPISODE, "growth").rows


def test_a_chart_is_read_with_the_arrow_keys(page, server):
    open_page(page, server, EPISODE)
    readout = panel(page, "growth").locator(".chart-title")
    expect(readout).to_contain_text("epoch 8   score 62.0   twin 22.0")

    panel(page, "growth").locator(".chart").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")

    expect(readout).to_contain_text("epoch 7   score 64.1   twin 22.0")


def test_two_runs_stand_side_by_side_on_the_same_axes(page, server):
    open_page(page, server)
    row_of(page, EPISODE).get_by_role("button").click()
    row_of(page, TRAINING).get_by_role("button").click()

    page.get_by_role("button", name="compare", exact=True).click()

    expect(page.locator("h1")).to_have_text([EPISODE, TRAINING])
    expect(panel(page, "difference")).to_contain_text("controller")
    expect(panel(page, "growth").locator(".chart")).to_have_count(2)
    left, right = panel(page, "growth").all()
    expect(left.locator("canvas").first).to_be_visible()
    expect(right.locator("canvas").first).to_be_visible()
    # The episode goes from 10 to 64 points, the training's iterations all end at 61.5: both show the whole.
    limits = [side.locator(".chart").get_attribute("data-limits") for side in (left, right)]
    assert limits[0] == limits[1]
    low, high = json.loads(limits[0])[0]
    assert low <= 10.0
    assert high >= 64.1
    boxes = left.bounding_box(), right.bounding_box()
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] < boxes[1]["x"]


def test_lanes_side_by_side_have_the_same_axes(page, server, runs, tmp_path):
    """The episode scores up to 64 points, the weak one a tenth of that."""
    rows = list(fake_run.episode())
    for row in rows:
        if isinstance(row, EpochRow):
            change(row, val_score=0.1 * row.val_score, twin_score=0.1 * (row.twin_score or 0.0))
    weak = write_run(runs / "weak", rows)
    open_page(page, server)
    row_of(page, "weak").get_by_role("button").click()
    row_of(page, EPISODE).get_by_role("button").click()
    page.get_by_role("button", name="compare", exact=True).click()

    panel(page, "lanes").first.scroll_into_view_if_needed()
    expect(panel(page, "lanes").locator("svg")).to_have_count(2)
    left, right = panel(page, "lanes").locator("svg").all()
    ticks = [side.locator('text.dim[text-anchor="end"]').all_text_contents() for side in (left, right)]
    assert ticks[0] == ticks[1]
    assert "60" in ticks[0]
    assert ">60<" not in picture_of(weak, "lanes").svg
    move_away(page, weak, tmp_path)


def test_a_damaged_run_says_why_and_the_others_are_shown(page, server, runs, tmp_path):
    damaged = write_run(runs / "damaged")
    with lines_of(damaged).open("a") as file:
        file.write("<script>alert(1)</script>\n")

    open_page(page, server)

    expect(row_of(page, "damaged")).to_contain_text("is not a row: it must begin with the name of a table")
    expect(row_of(page, EPISODE)).to_contain_text("61.5")
    row_of(page, "damaged").get_by_role("link").click()
    expect(page.get_by_role("alert")).to_contain_text("is not a row: it must begin with the name of a table")
    move_away(page, damaged, tmp_path)


def test_a_query_is_answered_or_refused_below_its_box(page, server, seen):
    open_page(page, server, EPISODE)
    expect(panel(page, "growth").locator("canvas").first).to_be_visible()
    page.keyboard.press("/")
    box = page.get_by_label("query in SQL")
    expect(box).to_be_focused()

    box.fill("SELECT max(val_score) AS best FROM epoch")
    page.keyboard.press("Control+Enter")
    expect(panel(page, "sql").locator("tbody").first).to_have_text("64.1")

    box.fill("DROP TABLE epoch")
    page.keyboard.press("Control+Enter")
    expect(panel(page, "sql").get_by_role("alert")).to_contain_text("read and never changed")

    box.fill("SELECT repeat('x', 100000) FROM range(1000)")  # 100 MB
    page.keyboard.press("Control+Enter")
    expect(panel(page, "sql").get_by_role("alert")).to_contain_text("larger than 4 MB; add a LIMIT")
    assert len(seen.errors) == 2  # the browser notes that the server refused
    seen.errors.clear()


# --- how it is used -------------------------------------------------------------------------------


def test_everything_is_reached_with_keys(page, server):
    open_page(page, server)
    for name in (EPISODE, TRAINING):
        expect(row_of(page, name)).to_contain_text("finished")
    names = [row.get_attribute("data-name") for row in page.locator("tr[data-run]").all()]
    expect(row_of(page, names[0]).get_by_role("link")).to_be_focused()

    page.keyboard.press("j")
    expect(row_of(page, names[1]).get_by_role("link")).to_be_focused()
    outline = row_of(page, names[1]).get_by_role("link").evaluate("one => getComputedStyle(one).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("c")
    page.keyboard.press("ArrowUp")
    expect(row_of(page, names[0]).get_by_role("link")).to_be_focused()
    page.keyboard.press("c")
    expect(page.locator("#marks")).to_contain_text(f"{names[1]}  and  {names[0]}")
    page.keyboard.press("Shift+C")
    expect(page.locator("h1")).to_have_text([names[1], names[0]])

    page.keyboard.press("Escape")
    expect(row_of(page, names[0]).get_by_role("link")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text(names[0])
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("mark for comparison")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    expect(page.locator("h1")).to_have_text(names[0])


def test_light_and_dark_follow_the_system_until_one_is_chosen(page, server):
    def paper() -> str:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    page.emulate_media(color_scheme="light")
    open_page(page, server)
    assert paper() == "rgb(255, 255, 255)"
    page.emulate_media(color_scheme="dark")
    dark = paper()
    assert sum(map(int, dark[4:-1].split(", "))) < 120
    page.keyboard.press("d")
    assert paper() == "rgb(255, 255, 255)"
    page.reload()
    assert paper() == "rgb(255, 255, 255)"


@pytest.mark.parametrize("name", [None, TRAINING])
def test_a_phone_needs_no_scrolling_sideways(page, server, name):
    page.set_viewport_size({"width": 390, "height": 844})
    open_page(page, server, name)
    if name is not None:
        expect(panel(page, "growth").locator("canvas").first).to_be_visible()

    assert page.evaluate("document.documentElement.scrollWidth") == 390
