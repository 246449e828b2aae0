"""Fixtures: an ``esper serve`` process and one real browser per test file.

Playwright runs an event loop in this thread while its browser is open, so the browser is closed after each
test file.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = Path("/usr/bin/chromium")
START = "from esper.scripts.cli import main; main()"
LOCAL = ("127.0.0.1", "localhost")


@dataclass
class Server:
    """Process of the command ``esper serve``, with the URL of its server."""

    process: subprocess.Popen[str]
    url: str

    @classmethod
    def start(cls, folder: Path, *flags: str) -> Server:
        process = subprocess.Popen(
            [sys.executable, "-c", START, "serve", str(folder), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert process.stdout is not None
        output = process.stdout.readline()
        found = re.search(r"http://\S+", output)
        assert found, f"{output}{process.stderr.read() if process.stderr else ''}"
        return cls(process, found[0])

    def stop(self) -> tuple[int, str]:
        """Send SIGINT to the server process; return its exit code and error output."""
        self.process.send_signal(signal.SIGINT)
        _, output = self.process.communicate(timeout=120)
        return self.process.returncode, output


@dataclass
class Seen:
    """Console errors of a web page, and its requests to other machines."""

    errors: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of runs that ``esper serve`` shows."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def server(runs: Path) -> Iterator[Server]:
    started = Server.start(runs, "--port", "0")
    yield started
    assert started.stop() == (0, "\nesper: the page is closed; runs go on without it\n")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"Chromium is not installed: there is no {CHROMIUM}")
    playwright.expect.set_options(timeout=120_000)
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def page(browser: Browser, seen: Seen) -> Iterator[Page]:
    """Yield a web page that must log no errors and must send no request to another machine."""
    opened = browser.new_page(viewport={"width": 1400, "height": 900})
    opened.set_default_timeout(120_000)
    opened.on("console", lambda entry: seen.errors.append(entry.text) if entry.type == "error" else None)
    opened.on("pageerror", lambda error: seen.errors.append(str(error)))
    opened.on(
        "request",
        lambda asked: seen.foreign.append(asked.url) if urlsplit(asked.url).hostname not in LOCAL else None,
    )
    yield opened
    opened.close()
    assert seen == Seen()
