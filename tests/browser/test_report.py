"""HTML report of a run, opened as a file in a real browser: phone and desktop width, light and dark theme."""

from pathlib import Path

import pytest

from esper.karn.page.sections import render_report
from esper.karn.run import open_run
from tests.karn.serving import training, write_run

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    run = write_run(folder / "run", training(3), iterations=3, controller="ppo")
    file = folder / "report.html"
    file.write_text(render_report(open_run(run)), encoding="utf-8")
    return file


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (360, "dark"), (1280, "dark")])
def test_html_report_needs_no_horizontal_scrolling_and_loads_no_other_file(browser, report, width, scheme):
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    asked, errors = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda entry: errors.append(entry.text) if entry.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))

    page.goto(report.as_uri())

    assert page.evaluate("document.documentElement.scrollWidth") <= width
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper[4:-1].split(", "))) < 120) == (scheme == "dark")
    # Texts in the charts of a report are at least 8 pixels high, also at the width of a phone.
    heights = page.evaluate(
        "[...document.querySelectorAll('svg.esper text')].map(one => one.getBoundingClientRect().height)"
    )
    assert min(height for height in heights if height) >= 8
    assert (asked, errors) == ([report.as_uri()], [])
    page.close()
