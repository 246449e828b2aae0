"""What the endpoints send: a run's page, its figures, a diary, a comparison, as plain values and texts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from esper.karn import notation
from esper.karn.conclusion import Conclusion, comparison_text, conclude
from esper.karn.diary import diary
from esper.karn.drawing.picture import Figure, Picture
from esper.karn.figures import FIGURES
from esper.karn.outcome import compare
from esper.karn.palette import LOOKS
from esper.karn.questions.differences import differences
from esper.karn.questions.episodes import EpisodeKey, EpisodeSummary, default_episode, episodes
from esper.karn.questions.verdict import verdict_picture
from esper.karn.report import rows_of_episode
from esper.karn.run import Run
from esper.karn.serve.charts import CHARTS, Chart
from esper.karn.serve.entries import Entry, entry_of
from esper.karn.serve.settings import configuration, provenance, text_of
from esper.leyline.columns import COLUMNS

IN_THE_HEADER: Final = "progress"
"""The figure that the header of a page takes the place of."""
OF_ONE_EPISODE: Final = frozenset({"lanes"})
"""Figures that show one episode."""


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
class Episode:
    """One episode to choose."""

    env: int
    episode: int
    group: str
    """The iteration, or the episode, that it shares with other environments."""
    score: str


@dataclass(frozen=True, slots=True)
class FigureName:
    """A figure that can be asked for."""

    key: str
    question: str
    of_episode: bool


@dataclass(frozen=True, slots=True)
class Page:
    """Everything about a run but its figures; of one that cannot be read, why."""

    entry: Entry
    conclusion: Conclusion | None = None
    figures: list[FigureName] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)
    episode: dict[str, int] | None = None
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
    """Scores against parameters and compute; None: there is no finished episode."""
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


def page_of(run: Run) -> Page:
    """What a run's page shows beside its figures."""
    row, episode = run.row, default_episode(run)
    return Page(
        entry=entry_of(run),
        conclusion=conclude(run),
        figures=[
            FigureName(figure.key, figure.question, figure.key in OF_ONE_EPISODE)
            for figure in FIGURES
            if figure.key != IN_THE_HEADER
        ],
        episodes=[_shown_episode(episode) for episode in episodes(run)],
        episode=None if episode is None else episode._asdict(),
        config=configuration(row),
        provenance=provenance(row),
        tables=[(table, [column.name for column in columns]) for table, columns in COLUMNS.items()],
    )


def shown_figure(run: Run, figure: Figure, episode: EpisodeKey | None) -> ShownFigure | None:
    """The figure of a run, or of one of its episodes."""
    picture = figure.answer(run, episode)
    if picture is None:
        return None
    chart = CHARTS.get(figure.key)
    return _shown(picture, chart(run, episode) if chart else None)


def figure_beside(run: Run, figure: Figure, other: Run | None) -> ShownFigure | None:
    """The figure of a run on axes that hold the other run too; None: that one cannot be read.

    The axes of charts are shared by whoever draws them.
    """
    if other is None or figure.key in CHARTS:
        return shown_figure(run, figure, None)
    picture = figure.answer(run, beside=other)
    return None if picture is None else _shown(picture, None)


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


def diary_of(run: Run, episode: EpisodeKey | None) -> list[ShownNote]:
    """The diary of an episode; without one, of the run's default episode."""
    episode = default_episode(run) if episode is None else episode
    if episode is None:
        return []
    return [
        ShownNote(
            note.epoch,
            note.text,
            None if note.stage is None else note.stage.name.lower(),
            "" if note.stage is None else LOOKS[note.stage].glyph,
        )
        for note in diary(run.row, rows_of_episode(run, episode))
    ]


def _shown_episode(episode: EpisodeSummary) -> Episode:
    group = (
        f"iteration {episode.iteration}"
        if episode.iteration is not None
        else f"episode {episode.key.episode}"
    )
    return Episode(episode.key.env, episode.key.episode, group, notation.points(episode.score))
