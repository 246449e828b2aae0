"""What a browser can ask, as JSON: runs, figures with their tables, episodes, diaries, and SQL.

Endpoints are plain functions that starlette runs on threads; all but SQL answer from ``Readings``. Every
refusal is a sentence.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Final, TypeVar

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from esper.karn import notation
from esper.karn.figures import figure_named
from esper.karn.questions.episodes import EpisodeKey
from esper.karn.run import Run, open_run
from esper.karn.serve.content import (
    Listed,
    Listing,
    NamedPage,
    Page,
    ShownAnswer,
    compared,
    diary_of,
    figure_beside,
    page_of,
    shown_figure,
)
from esper.karn.serve.entries import Entry, entry_of
from esper.karn.serve.events import events_response
from esper.karn.serve.folder import FoundRun, UnknownRunError
from esper.karn.serve.readings import ReadingError, Readings
from esper.leyline.errors import UNREADABLE, EsperError

MOST_ROWS: Final = 1_000
MOST_BYTES: Final = 4_000_000
MOST_SECONDS: Final = 10.0
MOST_MEMORY: Final = 512
"""What one query may take; memory in MB."""
MOST_QUERY_BYTES: Final = 100_000
T = TypeVar("T")


class QueryRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a POST to ``sql``."""

    query: str


class Api:
    """The endpoints over one folder."""

    def __init__(self, readings: Readings, is_ending: Callable[[], bool]) -> None:
        self._readings = readings
        self._is_ending = is_ending
        self._folder = readings.folder
        self._one_query = threading.Lock()

    def routes(self) -> list[Route]:
        """Every address below ``/api``."""
        run = "/api/runs/{id}"
        return [
            Route("/api/events", self.events),
            Route("/api/runs", self.runs),
            Route(run, self.page),
            Route(f"{run}/entry", self.entry),
            Route(f"{run}/figures/{{key}}", self.figure),
            Route(f"{run}/diary", self.diary),
            Route(f"{run}/sql", self.sql, methods=["POST"]),
            Route("/api/comparisons/{left}/{right}", self.comparison),
        ]

    async def events(self, request: Request) -> Response:
        """Which runs have new rows, as long as somebody listens."""
        return events_response(self._folder, self._is_ending)

    def runs(self, request: Request) -> Response:
        """The runs of the folder, none of them read."""
        found = self._folder.runs().values()
        return _json(
            Listing(self._folder.root.name, [Listed(run.id, run.name, run.version) for run in found])
        )

    def entry(self, request: Request) -> Response:
        """A run's line in the list; of one that cannot be read, why."""
        try:
            return _json(self._ask(request, "entry", entry_of))
        except ReadingError as error:
            return _json(Entry(state="unreadable", error=str(error)))

    def page(self, request: Request) -> Response:
        """A run without its figures."""
        found = self._folder.run(request.path_params["id"])
        try:
            page = self._ask(request, "page", page_of)
        except ReadingError as error:
            page = Page(Entry(state="unreadable", error=str(error)))
        return _json(NamedPage(self._folder.root.name, found.name, page))

    def figure(self, request: Request) -> Response:
        """A figure with its table, on axes that hold another run too if asked; null: nothing to show."""
        key, episode = request.path_params["key"], _episode(request)
        figure, other = figure_named(key), request.query_params.get("beside")
        if other is not None:
            return _json(
                self._readings.ask_beside(
                    request.path_params["id"],
                    other,
                    ("figure", key),
                    lambda run, beside: figure_beside(run, figure, beside),
                )
            )
        return _json(
            self._ask(request, ("figure", key, episode), lambda run: shown_figure(run, figure, episode))
        )

    def diary(self, request: Request) -> Response:
        """What happened in an episode."""
        episode = _episode(request)
        return _json(self._ask(request, ("diary", episode), lambda run: diary_of(run, episode)))

    def comparison(self, request: Request) -> Response:
        """One run against another."""
        left, right = (self._folder.run(request.path_params[side]) for side in ("left", "right"))
        return _json(
            self._readings.ask_both(
                left.id, right.id, lambda one, other: compared((left.name, one), (right.name, other))
            )
        )

    async def sql(self, request: Request) -> Response:
        """The answer to a query that somebody wrote; one query at a time."""
        query = await _query(request)
        found = await run_in_threadpool(self._folder.run, request.path_params["id"])
        if found.refusal is not None:
            raise ReadingError(found.refusal)
        return await run_in_threadpool(self._run_query, found, query)

    def _run_query(self, found: FoundRun, query: str) -> Response:
        if not self._one_query.acquire(blocking=False):
            raise EsperError("another query is running; wait for its answer")
        try:
            answer = open_run(found.path).untrusted(
                query, max_rows=MOST_ROWS, max_bytes=MOST_BYTES, seconds=MOST_SECONDS, memory=MOST_MEMORY
            )
        except EsperError as error:
            raise ReadingError(str(error).replace(f"{found.path}/", "")) from None
        finally:
            self._one_query.release()
        rows = [[notation.cell(value) for value in row] for row in answer.rows]
        return _json(ShownAnswer(answer.columns, rows, answer.note))

    def _ask(self, request: Request, question: Hashable, answer: Callable[[Run], T]) -> T:
        return self._readings.ask(request.path_params["id"], question, answer)


def _episode(request: Request) -> EpisodeKey | None:
    """The episode that the address names, if it does."""
    given = [request.query_params.get(name) for name in ("env", "episode")]
    if given == [None, None]:
        return None
    try:
        env, episode = (int(text or "") for text in given)
    except ValueError:
        raise EsperError("an episode is named by two whole numbers, such as ?env=0&episode=3") from None
    return EpisodeKey(env, episode)


async def _query(request: Request) -> str:
    """The query of a POST: JSON, said to be JSON, and of a size that somebody could have written."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise EsperError('a query is sent as application/json, such as {"query": "SELECT 1"}')
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_QUERY_BYTES:
            raise EsperError(f"a query has at most {MOST_QUERY_BYTES:,} bytes")
    try:
        return msgspec.json.decode(body, type=QueryRequest).query
    except UNREADABLE as error:
        raise EsperError(
            f'a query is sent as {{"query": "SELECT 1"}}; found something else: {error}'
        ) from None


def _json(content: object) -> Response:
    return Response(
        msgspec.json.encode(content), media_type="application/json", headers={"Cache-Control": "no-store"}
    )


def refusal(request: Request, error: Exception) -> Response:
    """A user's mistake as a sentence."""
    status = 404 if isinstance(error, UnknownRunError) else 400
    return JSONResponse({"error": str(error)}, status_code=status)
