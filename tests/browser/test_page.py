"""Web page of ``esper serve`` in a real browser: live updates, content, and use without a mouse."""

import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from esper.karn.drawing.picture import Picture
from esper.karn.figures import figure_named
from esper.karn.questions.episode_selection import EpisodeKey
from esper.karn.run import open_run
from esper.nissa.encoding import RowEncoder
from esper.nissa.writer import RunWriter
from tests.browser.conftest import Server
from tests.karn import fake_run
from tests.karn.serving import lines_of, training, write_run

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect

EPISODE, TRAINING = "episode", "deep/training"


@pytest.fixture(scope="module", autouse=True)
def written(runs: Path) -> None:
    """Write two finished runs, one episode and one policy training, to the served folder."""
    write_run(runs / EPISODE)
    write_run(runs / TRAINING, training(3), iterations=3, controller="ppo")


@pytest.fixture
def live(page, server, runs: Path, tmp_path: Path) -> Iterator[RunWriter]:
    """Yield the open writer of a run in progress."""
    with RunWriter(runs / "live") as writer:
        writer.emit(fake_run.run_row("live"))
        writer.emit(fake_run.epoch_row(0))
        writer.flush()
        yield writer
    move_away(page, server, runs / "live", tmp_path)


def move_away(page, server, run: Path, place: Path) -> None:
    """Close the web page, move a run out of the served folder, and wait until the server no longer lists it.

    The server lists its folder only at intervals; a page opened before the next listing would request the
    moved run.
    """
    page.close()
    run.rename(place / run.name)
    while f'data-name="{run.name}"'.encode() in urlopen(f"{server.url}rows").read():
        time.sleep(0.1)


def row_of(page, name: str):
    return page.locator(f'tr[data-name="{name}"]')


def open_page(page, server, name: str | None = None) -> None:
    """Open the served list of runs, or the page of the named run."""
    page.goto(server.url)
    if name is not None:
        row_of(page, name).get_by_role("link").click()
        expect(page.locator("h1")).to_have_text(name)


def fact(page, label: str):
    return page.locator(f'.fact[data-fact="{label}"] b')


def panel(page, key: str):
    return page.locator(f'[data-part*="/{key}"]')


def picture_of(run: Path, key: str, episode: EpisodeKey | None = None) -> Picture:
    picture = figure_named(key).answer(open_run(run), episode)
    assert picture is not None
    return picture


# --- live updates -----------------------------------------------------------------------------------


def test_new_run_appears_in_the_list_of_runs_and_its_score_updates_without_reload(
    page, server, runs, tmp_path
):
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


def test_web_page_of_a_run_updates_without_reload_until_the_run_ends(page, server, live):
    open_page(page, server, "live")
    page.evaluate("window.isTheSamePage = true")
    expect(fact(page, "progress")).to_have_text("epoch 0/8")
    expect(panel(page, "growth").locator("svg")).to_contain_text("score 10.0")

    _, *rows = fake_run.episode()
    half = next(at for at, row in enumerate(rows) if row == fake_run.epoch_row(4)) + 1
    for row in [*rows[:half], fake_run.alert_row("collapse")]:
        live.emit(row)
    live.flush()
    expect(fact(page, "progress")).to_have_text("epoch 4/8")
    expect(page.locator(".head .alerts")).to_contain_text("collapse")
    expect(fact(page, "score")).to_have_text("41.0")
    expect(panel(page, "growth").locator("svg")).to_contain_text("score 41.0")
    expect(panel(page, "lanes").locator("svg")).to_contain_text("conv_light")
    expect(panel(page, "lanes").locator("svg")).not_to_contain_text("norm")

    for row in [*rows[half:], fake_run.alert_row("collapse", "cleared")]:
        live.emit(row)
    live.flush()
    expect(fact(page, "progress")).to_have_text("epoch 8/8")
    expect(page.locator(".head")).not_to_contain_text("collapse")
    expect(panel(page, "lanes").locator("svg")).to_contain_text("norm")
    expect(panel(page, "diary")).to_contain_text("conv_heavy germinated in r0c1")
    live.close()
    expect(page.locator(".head .state")).to_have_text("finished")
    assert page.evaluate("window.isTheSamePage")


def test_web_page_reconnects_and_updates_after_the_server_restarts(page, seen, tmp_path):
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
    # The browser logs an error for each request that fails while the server is stopped; such errors are
    # expected.
    seen.errors.clear()


# --- content ----------------------------------------------------------------------------------------


def test_opened_table_of_a_chart_keeps_keyboard_focus_when_the_web_page_updates(page, server, live):
    open_page(page, server, "live")
    details = panel(page, "growth").locator("details")
    details.locator("summary").click()
    details.locator(".scroll").focus()
    expect(panel(page, "growth").locator("tbody tr")).to_have_count(1)

    live.emit(fake_run.epoch_row(1))
    live.flush()

    expect(panel(page, "growth").locator("tbody tr")).to_have_count(2)
    expect(details.locator(".scroll")).to_be_focused()


def test_slot_timeline_on_the_web_page_shows_the_selected_episode(page, server, runs):
    open_page(page, server, TRAINING)
    shown = page.get_by_label("which iteration or episode")

    shown.select_option(label="iteration 2")

    first = picture_of(runs / TRAINING, "lanes", EpisodeKey(0, 1))
    expect(panel(page, "lanes").locator("figcaption")).to_have_text(first.caption)
    shown.focus()
    # Escape closes the drop-down list of episodes and does not leave the page.
    page.keyboard.press("Escape")
    page.keyboard.press("]")
    later = picture_of(runs / TRAINING, "lanes", EpisodeKey(0, 2))
    expect(panel(page, "lanes").locator("figcaption")).to_have_text(later.caption)
    expect(shown).to_have_value("0-2-0")


def test_key_t_opens_the_table_of_a_chart_and_tooltips_show_the_values_of_an_epoch(page, server):
    open_page(page, server, EPISODE)
    expect(panel(page, "growth").locator("svg")).to_be_visible()

    page.keyboard.press("t")

    expect(panel(page, "growth").locator("tbody tr")).to_have_count(9)
    expect(panel(page, "growth").locator("tbody")).to_be_visible()
    tooltips = panel(page, "growth").locator("svg .hits title").all_text_contents()
    assert tooltips[-1] == "epoch 8: twin 22.0, score 62.0, parameters 438"


def test_charts_of_two_compared_runs_are_side_by_side_with_the_same_axes(page, server, runs):
    open_page(page, server)
    for name in (EPISODE, TRAINING):
        expect(row_of(page, name)).to_contain_text("finished")
        row_of(page, name).get_by_role("checkbox").check()

    page.get_by_role("button", name="compare").click()

    # The comparison page shows runs in the order of the list of runs.
    expect(page.locator("h1")).to_have_text([TRAINING, EPISODE])
    page.locator("#differences summary").click()
    expect(page.locator("#differences")).to_contain_text("controller")
    panel(page, "lanes").first.scroll_into_view_if_needed()
    expect(panel(page, "lanes").locator("svg")).to_have_count(2)
    left, right = panel(page, "lanes").all()
    ticks = [side.locator('svg text.dim[text-anchor="end"]').all_text_contents() for side in (left, right)]
    assert ticks[0] == ticks[1]
    boxes = left.bounding_box(), right.bounding_box()
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] < boxes[1]["x"]


# --- interaction ------------------------------------------------------------------------------------


def test_all_controls_of_the_web_page_are_reachable_by_keyboard(page, server):
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
    expect(page.get_by_role("button", name="compare")).to_be_visible()
    page.keyboard.press("Shift+C")
    expect(page.locator("h1")).to_have_text(names)
    # Keyboard shortcuts work only after the script of the page has run.
    page.wait_for_load_state()

    page.keyboard.press("Escape")
    expect(row_of(page, names[0]).get_by_role("link")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text(names[0])
    page.wait_for_load_state()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("mark for comparison")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    expect(page.locator("h1")).to_have_text(names[0])


def test_colour_theme_is_that_of_the_system_until_the_user_selects_one(page, server):
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
def test_web_page_on_a_phone_needs_no_horizontal_scrolling(page, server, name):
    page.set_viewport_size({"width": 390, "height": 844})
    open_page(page, server, name)
    if name is not None:
        expect(panel(page, "growth").locator("svg")).to_be_visible()

    assert page.evaluate("document.documentElement.scrollWidth") == 390
