"""What a browser can ask, as JSON: runs, figures with their tables, lives, diaries, and SQL.

Endpoints are plain functions that starlette runs on threads; all but SQL answer from ``Readings``. Every
refusal is a sentence.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from esper.karn import notation
from esper.karn.conclusion import Conclusion, comparison_text, conclude
from esper.karn.diary import diary
from esper.karn.figures import FIGURES, Figure, Picture, verdict_picture
from esper.karn.outcome import compare
from esper.karn.palette import LOOKS
from esper.karn.questions.differences import differences
from esper.karn.questions.lives import LifeKey, LifeSummary, default_life, lives
from esper.karn.report import rows_of_life
from esper.karn.run import Run, open_run
from esper.karn.serve.charts import CHARTS, Chart
from esper.karn.serve.entries import Entry, entry_of
from esper.karn.serve.events import events_response
from esper.karn.serve.folder import FoundRun, UnknownRunError
from esper.karn.serve.readings import ReadingError, Readings
from esper.karn.serve.settings import configuration, provenance, text_of
from esper.leyline.columns import COLUMNS
from esper.leyline.errors import EsperError, UnknownNameError

MOST_ROWS: Final = 1_000
MOST_BYTES: Final = 4_000_000
MOST_SECONDS: Final = 10.0
MOST_MEMORY: Final = 512
"""What one query may take; memory in MB."""
MOST_QUERY_BYTES: Final = 100_000
IN_THE_HEADER: Final = "progress"
"""The figure that the header of a page takes the place of."""
OF_ONE_LIFE: Final = frozenset({"lanes"})
"""Figures that show one life."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Listed:
    """A run of the folder, before anything of it was read."""

    id: str
    name: str
    version: str


@dataclass(frozen=True, slots=True)
class Listing:
    """All runs of the folder."""

    folder: str
    runs: list[Listed]


@dataclass(frozen=True, slots=True)
class Life:
    """One life to choose."""

    env: int
    episode: int
    group: str
    """The round, or the life, that it shares with other environments."""
    score: str


@dataclass(frozen=True, slots=True)
class FigureName:
    """A figure that can be asked for."""

    key: str
    question: str
    of_life: bool


@dataclass(frozen=True, slots=True)
class Page:
    """Everything about a run but its figures; of one that cannot be read, why."""

    entry: Entry
    conclusion: Conclusion | None = None
    figures: list[FigureName] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    life: dict[str, int] | None = None
    """What is shown unless another one is chosen."""
    config: list[tuple[str, str]] = field(default_factory=list)
    provenance: list[tuple[str, str]] = field(default_factory=list)
    tables: list[tuple[str, list[str]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class NamedPage:
    """A page and where it is."""

    folder: str
    name: str
    page: Page


@dataclass(frozen=True, slots=True)
class ShownFigure:
    """A picture, or a chart in its place, and the table behind both."""

    svg: str
    chart: Chart | None
    columns: list[str]
    rows: list[list[str]]
    caption: str


@dataclass(frozen=True, slots=True)
class Compared:
    """How one run stands against another."""

    sentence: str
    verdict: ShownFigure | None
    """Scores against parameters and compute; None: there is no finished life."""
    differences: list[tuple[str, str, str]]
    """Every setting that differs, with both values."""


@dataclass(frozen=True, slots=True)
class ShownAnswer:
    """What came of a query, as texts."""

    columns: list[str]
    rows: list[list[str]]
    note: str | None
    """Why rows were left out; None: these are all."""


@dataclass(frozen=True, slots=True)
class ShownNote:
    """One sentence of a diary."""

    epoch: int
    text: str
    stage: str | None
    glyph: str


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
        """A figure with its table; null: the run has nothing to show for it."""
        key, life = request.path_params["key"], _life(request)
        figure = _figure(key)
        return _json(self._ask(request, ("figure", key, life), lambda run: shown_figure(run, figure, life)))

    def diary(self, request: Request) -> Response:
        """What happened in a life."""
        life = _life(request)
        return _json(self._ask(request, ("diary", life), lambda run: diary_of(run, life)))

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
        finally:
            self._one_query.release()
        return _json(
            ShownAnswer(answer.columns, [[cell(value) for value in row] for row in answer.rows], answer.note)
        )

    def _ask(self, request: Request, question: Hashable, answer: Callable[[Run], T]) -> T:
        return self._readings.ask(request.path_params["id"], question, answer)


def page_of(run: Run) -> Page:
    """What a run's page shows beside its figures."""
    row, life = run.row, default_life(run)
    return Page(
        entry=entry_of(run),
        conclusion=conclude(run),
        figures=[
            FigureName(figure.key, figure.question, figure.key in OF_ONE_LIFE)
            for figure in FIGURES
            if figure.key != IN_THE_HEADER
        ],
        lives=[_shown_life(life) for life in lives(run)],
        life=None if life is None else life._asdict(),
        config=configuration(row),
        provenance=provenance(row),
        tables=[(table, [column.name for column in columns]) for table, columns in COLUMNS.items()],
    )


def shown_figure(run: Run, figure: Figure, life: LifeKey | None) -> ShownFigure | None:
    """The figure of a run, or of one of its lives."""
    picture = figure.answer(run, life)
    if picture is None:
        return None
    chart = CHARTS.get(figure.key)
    return _shown(picture, chart(run, life) if chart else None)


def _shown(picture: Picture, chart: Chart | None) -> ShownFigure:
    return ShownFigure(str(picture.svg), chart, picture.columns, picture.rows, picture.caption)


def compared(left: tuple[str, Run], right: tuple[str, Run]) -> Compared:
    """The first run against the second, each with its name."""
    runs = dict((left, right))
    picture = verdict_picture(runs)
    return Compared(
        sentence=comparison_text(compare(left[1], right[1])),
        verdict=None if picture is None else _shown(picture, None),
        differences=[(one.key, text_of(one.values[0]), text_of(one.values[-1])) for one in differences(runs)],
    )


def diary_of(run: Run, life: LifeKey | None) -> list[ShownNote]:
    """The diary of a life; without one, of the run's default life."""
    life = default_life(run) if life is None else life
    if life is None:
        return []
    return [
        ShownNote(
            note.epoch,
            note.text,
            None if note.stage is None else note.stage.name.lower(),
            "" if note.stage is None else LOOKS[note.stage].glyph,
        )
        for note in diary(run.row, rows_of_life(run, life))
    ]


def cell(value: object) -> str:
    """A value of a query's answer, for reading."""
    if value is None:
        return notation.UNKNOWN
    return f"{value:.6g}" if isinstance(value, float) else text_of(value)


def _shown_life(life: LifeSummary) -> Life:
    group = f"round {life.round}" if life.round is not None else f"life {life.key.episode}"
    return Life(life.key.env, life.key.episode, group, notation.points(life.score))


def _figure(key: str) -> Figure:
    for figure in FIGURES:
        if figure.key == key:
            return figure
    raise UnknownNameError("figure", key[:40], [figure.key for figure in FIGURES])


def _life(request: Request) -> LifeKey | None:
    """The life that the address names, if it does."""
    given = [request.query_params.get(name) for name in ("env", "episode")]
    if given == [None, None]:
        return None
    try:
        env, episode = (int(text or "") for text in given)
    except ValueError:
        raise EsperError("a life is named by two whole numbers, such as ?env=0&episode=3") from None
    return LifeKey(env, episode)


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
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
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
