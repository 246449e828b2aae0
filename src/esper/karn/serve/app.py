"""ASGI application of the web server, protected by access control: static files, and views that show the list
of runs, one run, a comparison of two runs, their sections, and server-sent events.

The page of a run is loaded without the content of its sections. The browser loads a section of a page when it
becomes visible, and again when the run has new rows. Endpoints of the web server are plain functions, which
starlette runs on threads.
"""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from esper.karn.page import sections
from esper.karn.page.rendering import render, style
from esper.karn.page.sections import KEYS, OF_EPISODE, ORIGIN, SHOWN, TITLES, Group, Section, parse_episode
from esper.karn.runs import ListedRun, overview
from esper.karn.serve.access_control import Access, Guard
from esper.karn.serve.folder import AnswerCache, FoundRun, ReadingError, RunFolder, UnknownRunError
from esper.leyline.errors import EsperError, UnknownNameError

STATIC: Final = Path(__file__).parent / "static"
SECONDS_TO_END: Final = 3
"""Seconds that open HTTP connections may take to close when the server stops."""
SECONDS: Final = 1.0
"""Seconds between two checks of the served folder for changes."""
HEARTBEAT_CHECKS: Final = 15
"""Number of checks without changes after which the server sends a comment to the browser, to detect dead
connections.
"""
RETRY_MS: Final = 2000
"""Milliseconds after which a browser reconnects to the stream of events."""
SECONDS_FOR_ROWS: Final = 0.5
"""Seconds that one request for the list of runs may spend on reading runs; later requests read the other
runs.
"""
PARTS: Final = ("head", *KEYS, *ORIGIN)
NO_STORE: Final = {"Cache-Control": "no-store"}


def create_app(folder: RunFolder, access: Access, is_ending: Callable[[], bool] = lambda: False) -> ASGIApp:
    """Create the web application that shows the runs of ``folder``, with the access control of ``access``."""
    views = Views(AnswerCache(folder), is_ending)

    def no_such_address(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        sentence = f"{HTTPStatus(status).phrase}: {request.method} {request.url.path[:200]}"
        page = views.refusal(request, EsperError(sentence))
        page.status_code = status
        return page

    files = [Route("/style.css", views.style), Mount("/static", StaticFiles(directory=STATIC))]
    handlers = {EsperError: views.refusal, HTTPException: no_such_address}
    return Guard(Starlette(routes=[*views.routes(), *files], exception_handlers=handlers), access)


def listen(host: str, port: int) -> socket.socket:
    """Open a listening TCP socket; port 0 selects a free port."""
    try:
        # On an invalid host name, socket.create_server() would leave its socket open, so the name is checked
        # first.
        host.encode("idna")
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise EsperError(
            f"cannot listen at {host}, port {port}: {reason}; choose another one with --port, or --port 0"
            " for any that is free"
        ) from None


def serve(folder: RunFolder, access: Access, listener: socket.socket) -> None:
    """Run the web server on the socket ``listener`` until it is interrupted."""
    config = uvicorn.Config(
        create_app(folder, access, lambda: server.should_exit),
        log_level="warning",
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=SECONDS_TO_END,
    )
    server = uvicorn.Server(config)
    server.run(sockets=[listener])


class Views:
    """Views (HTTP endpoints) of the web server for one folder of runs."""

    def __init__(self, cache: AnswerCache, is_ending: Callable[[], bool]) -> None:
        self._cache = cache
        self._is_ending = is_ending
        self._folder = cache.folder

    def routes(self) -> list[Route]:
        """Return the routes of all views of the web server, without the static files."""
        views: dict[str, Callable[[Request], Any]] = {
            "/": self.list,
            "/rows": self.rows,
            "/events": self.events,
        }
        views |= {"/runs/{id}": self.run, "/runs/{id}/{key}": self.part}
        views |= {"/compare": self.compare, "/comparison": self.comparison}
        return [Route(path, view) for path, view in views.items()]

    async def events(self, request: Request) -> Response:
        """Send the versions of all runs as server-sent events until the browser disconnects."""
        events = run_events(self._folder, self._is_ending)
        return StreamingResponse(events, media_type="text/event-stream", headers=NO_STORE)

    def list(self, request: Request) -> Response:
        """Return the web page with the list of runs."""
        return self._page("list.html", "esper", rows=self._rows())

    def rows(self, request: Request) -> Response:
        """Return the list of runs as HTML table rows."""
        return HTMLResponse(self._rows())

    def style(self, request: Request) -> Response:
        """Return the stylesheet of all pages."""
        return PlainTextResponse(style(), media_type="text/css", headers={"Cache-Control": "no-cache"})

    def run(self, request: Request) -> Response:
        """Return the web page of a run without the content of its sections."""
        found = self._folder.run(request.path_params["id"])
        groups = [
            ("heads", [self._pending(found, "head")]),
            ("panels", [self._pending(found, key) for key in KEYS]),
            ("origin", [self._pending(found, key) for key in ORIGIN]),
        ]
        return self._page("run.html", f"{found.name} · esper", groups=groups)

    def part(self, request: Request) -> Response:
        """Return a section of a run's page, for the episode and the second run named in the query string."""
        found, key = self._folder.run(request.path_params["id"]), request.path_params["key"]
        if key not in PARTS:
            raise UnknownNameError("part of a page", key[:40], PARTS)
        episode = parse_episode(request.query_params.get("at")) if key in OF_EPISODE else None
        compared = request.query_params.get("compared") if key in SHOWN else None

        def answer(run: Any, other: Any = None) -> str:
            if key == "head":
                return sections.head(run, found.name, served=True)
            return sections.run_section(run, key, episode, other)

        return self._answer(key, lambda: self._cache.ask(found.id, (key, episode), answer, compared))

    def compare(self, request: Request) -> Response:
        """Return the page that shows two runs side by side with common axes."""
        left, right = self._both(request)
        source, runs = f"/comparison?run={left.id}&run={right.id}", f"{left.id} {right.id}"
        both = Section("comparison", sections.empty("comparison"), "", source, runs)
        heads = [self._pending(left, "head"), self._pending(right, "head", "-2")]
        groups: list[Group] = [("sides", heads), ("panels", [both])]
        for key in SHOWN:
            pair = [self._pending(left, key, "", right), self._pending(right, key, "-2", left)]
            groups.append(("sides", pair))
        return self._page("run.html", f"{left.name} and {right.name} · esper", groups=groups)

    def comparison(self, request: Request) -> Response:
        """Return the page section that compares two runs."""
        left, right = self._both(request)

        def answer(run: Any, other: Any = None) -> str:
            if other is None:
                raise EsperError(f"'{right.name}' cannot be read")
            return sections.comparison({left.name: run, right.name: other}, in_words=True)

        return self._answer("comparison", lambda: self._cache.ask(left.id, "comparison", answer, right.id))

    def _rows(self) -> str:
        """Render the rows of the list of runs: runs in progress first, runs that were not read last, and
        otherwise the latest start first.
        """
        end = time.monotonic() + SECONDS_FOR_ROWS
        listed = [self._listed(found, end) for found in self._folder.runs().values()]
        listed.sort(key=lambda one: one.run_status.row.started if one.run_status else "", reverse=True)
        listed.sort(key=lambda one: (one.state == "unread", one.state != "running"))
        return render("rows.html", runs=listed)

    def _listed(self, found: FoundRun, end: float) -> ListedRun:
        if time.monotonic() > end and not self._cache.is_cached(found.id, "overview"):
            return ListedRun(found.name, "unread", id=found.id)
        try:
            known = self._cache.ask(found.id, "overview", overview)
        except ReadingError as error:
            return ListedRun(found.name, "damaged", problem=str(error), id=found.id)
        return ListedRun(found.name, known.progress.state, known, id=found.id)

    def _both(self, request: Request) -> tuple[FoundRun, FoundRun]:
        ids: Sequence[str] = request.query_params.getlist("run")
        if len(ids) != 2:
            raise EsperError(f"two runs are compared; {len(ids)} were named")
        return self._folder.run(ids[0]), self._folder.run(ids[1])

    def _pending(
        self, found: FoundRun, key: str, side: str = "", compared: FoundRun | None = None
    ) -> Section:
        """Return a placeholder for a page section that the browser loads later."""
        query = "" if compared is None else f"?compared={compared.id}"
        runs = found.id if compared is None else f"{found.id} {compared.id}"
        body = render("opening.html", name=found.name) if key == "head" else sections.empty(key)
        return Section(key, body, side, f"/runs/{found.id}/{key}{query}", runs)

    def _answer(self, key: str, work_out: Callable[[], str]) -> Response:
        """Return a page section, or the reason why the section cannot be shown."""
        try:
            return HTMLResponse(work_out(), headers=NO_STORE)
        except ReadingError as error:
            title = TITLES.get(key)
            return HTMLResponse(render("refusal.html", title=title, sentence=str(error)))

    def _page(self, template: str, title: str, **content: Any) -> Response:
        return HTMLResponse(
            render(template, title=title, served=True, folder=self._folder.root.name, **content),
            headers=NO_STORE,
        )

    def refusal(self, request: Request, error: Exception) -> Response:
        """Return an error page that shows the message of ``error``."""
        page = self._page("problem.html", "esper", sentence=str(error))
        page.status_code = 404 if isinstance(error, UnknownNameError | UnknownRunError) else 400
        return page


# --- server-sent events -----------------------------------------------------------------------------


async def run_events(
    folder: RunFolder, is_ending: Callable[[], bool], seconds: float = SECONDS
) -> AsyncIterator[str]:
    """Yield the server-sent events of one connection as text; each event has the version of every run.

    Every server-sent event has the versions of all runs, so an interrupted connection loses nothing. A
    server-sent event is sent at the start and whenever a run appears, changes or disappears; otherwise a
    comment is sent at intervals.
    """
    yield f"retry: {RETRY_MS}\n"
    known, quiet = None, 0
    while not is_ending():
        runs = await run_in_threadpool(folder.runs)
        found = {id: run.version for id, run in runs.items()}
        quiet = quiet + 1 if found == known else 0
        if not quiet:
            yield f"event: runs\ndata: {json.dumps(found)}\n\n"
        elif quiet % HEARTBEAT_CHECKS == 0:
            yield ": nothing new\n\n"
        known = found
        await asyncio.sleep(seconds)
