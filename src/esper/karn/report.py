"""A run as one HTML file that needs nothing else: the answer, the pictures, the diary, where it comes from.

Every number is the outcome's, a figure's, the diary's or a row's; here they only find their place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import Any, Final, NamedTuple

from esper.karn import notation
from esper.karn.conclusion import Conclusion, conclude, gain_text, score_text
from esper.karn.diary import Note, diary
from esper.karn.drawing.picture import Figure, Picture
from esper.karn.drawing.style import STYLE
from esper.karn.drawing.svg import Markup, element
from esper.karn.figures import FIGURES
from esper.karn.outcome import Comparison, Result, compare, final_rows, result
from esper.karn.palette import LOOKS, stage_variable
from esper.karn.questions.differences import differences
from esper.karn.questions.episodes import (
    THIS_EPISODE,
    EpisodeKey,
    default_episode,
    episode_name,
    episodes,
    is_training,
    notable_episodes,
)
from esper.karn.questions.verdict import verdict_picture
from esper.karn.run import Run
from esper.leyline.events import (
    AlertRow,
    DecisionRow,
    EpisodeRow,
    EpochRow,
    Row,
    RunRow,
    SeedRow,
    TransitionRow,
)

MOST_DIARIES: Final = 10
"""Episodes of a run that are told; a training tells its best, median and worst."""
PER_EPISODE: Final = "lanes"
"""The figure that shows one episode."""
ALERTS: Final = "alerts"
"""The figure whose table says what to do, and is open at once."""
_NUMBER: Final = re.compile(r"[<+-]?×?\d[\d,.:e+-]*( ± [\d.]+)?( (%|s|ms|[kMGTPE]?FLOP))?|–")
_POLICY_OUTPUT: Final = re.compile(r"(\(policy [^)]*\))")


def render_report(run: Run, against: Sequence[Run] = (), reproduction: str | None = None) -> str:
    """The page; ``reproduction`` is the command that does the same again, None if there is none."""
    comparisons = [compare(run, other) for other in against]
    sections = [
        *_comparison_section(run, comparisons),
        *_figure_sections(run),
        *_diary_section(run),
        *_origin_sections(run.row, reproduction),
    ]
    content = [
        *_opening(run, conclude(run, comparisons)),
        _contents(sections),
        *(section.shown for section in sections),
        tag("footer", f"Made by esper report from the run in {run.path}. – means unknown."),
    ]
    template = Template(files("esper.karn").joinpath("report.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=tag("span", f"{run.row.name}: {run.row.task}, {run.row.controller}")[6:-7],
        style=STYLE,
        glyphs="".join(f".glyph.{s.name.lower()}{{color:var({stage_variable(s)})}}" for s in LOOKS),
        content="\n".join(content),
    )


class Section(NamedTuple):
    """One part of the page."""

    key: str
    """Its address within the page."""
    title: str
    content: Sequence[Markup]

    @property
    def shown(self) -> Markup:
        return tag("section", tag("h2", self.title), *self.content, id=self.key)


def _contents(sections: Sequence[Section]) -> Markup:
    entries = (tag("li", tag("a", section.title, href=f"#{section.key}")) for section in sections)
    return tag("details", tag("summary", "Contents"), tag("ul", *entries), class_="contents")


# --- the answer -----------------------------------------------------------------------------------


def _opening(run: Run, found: Conclusion) -> Iterator[Markup]:
    row = run.row
    yield tag(
        "header",
        tag("strong", row.name),
        tag("span", row.task),
        tag("span", row.controller),
        tag("span", f"rng seed {row.rng_seed}"),
        tag("span", row.started.replace("T", " ").replace("+00:00", " UTC")),
        tag("span", run.state, class_="state"),
        class_="origin",
    )
    yield tag("h1", found.headline)
    yield tag("ul", *(tag("li", sentence) for sentence in found.sentences), class_="sentences")
    if found.facts:
        yield tag("dl", *(_fact(fact.name, fact.value, fact.note) for fact in found.facts), class_="facts")


def _fact(name: str, value: str, note: str) -> Markup:
    return tag("div", tag("dt", name), tag("dd", value, class_="value"), tag("dd", note, class_="note"))


def _comparison_section(run: Run, comparisons: Sequence[Comparison]) -> Iterator[Section]:
    if not comparisons:
        return
    columns = [
        "run",
        "episodes",
        "validation",
        "ahead",
        "test",
        "ahead",
        "parameters",
        "compute of an episode",
    ]
    rows = [_arm_cells(run, result(final_rows(run)), "", "")]
    for other in comparisons:
        ahead = (notation.UNKNOWN if d is None else gain_text(d) for d in (other.val_score, other.test_score))
        rows.append(_arm_cells(other.run, other.result, *ahead))
    note = (
        "Means of the episodes of each result; ± is half of a 95 % interval. Ahead: this run minus the"
        " other one, over episodes that began alike."
    )
    arms = arm_names([run, *(other.run for other in comparisons)])
    picture = verdict_picture(arms)
    content = [
        table(columns, rows),
        tag("p", note, class_="aside"),
        Markup("") if picture is None else _shown(picture),
        _differences(arms),
    ]
    yield Section("comparison", "How does it compare?", content)


def arm_names(runs: Sequence[Run]) -> dict[str, Run]:
    """The runs by their names; of runs that share one, the later ones have a number behind it."""
    named: dict[str, Run] = {}
    for run in runs:
        name, number = run.row.name, 1
        while name in named:
            number += 1
            name = f"{run.row.name} ({number})"
        named[name] = run
    return named


def _differences(arms: Mapping[str, Run]) -> Markup:
    found = differences(arms)
    if not found:
        return tag("p", "Their configurations are the same.", class_="aside")
    rows = [[one.key, *map(_value, one.values)] for one in found]
    return tag(
        "details",
        tag("summary", "What was set differently"),
        table(["setting", *arms], rows),
        id="differences",
    )


def _arm_cells(run: Run, found: Result | None, val_ahead: str, test_ahead: str) -> list[str]:
    row = run.row
    origin = f"{row.name} ({row.controller}, rng seed {row.rng_seed})"
    if found is None:
        return [origin, "0", *[notation.UNKNOWN] * 6]
    return [
        origin,
        notation.count(found.episodes),
        score_text(found.val_score),
        val_ahead,
        score_text(found.test_score),
        test_ahead,
        notation.count(round(found.params.mean)),
        notation.flop(round(found.flops.mean)),
    ]


# --- the pictures ---------------------------------------------------------------------------------


def _figure_sections(run: Run) -> Iterator[Section]:
    silent = []
    for figure in FIGURES:
        shown = _episode_pictures(run, figure) if figure.key == PER_EPISODE else _run_picture(run, figure)
        if shown:
            yield Section(figure.key, figure.question, shown)
        else:
            silent.append(figure.question)
    if silent:
        questions = tag("ul", *(tag("li", question) for question in silent), class_="aside")
        yield Section("silent", "What this run cannot answer", [questions])


def _run_picture(run: Run, figure: Figure) -> list[Markup]:
    picture = figure.answer(run)
    return [] if picture is None else [_shown(picture, is_open=figure.key == ALERTS)]


def _episode_pictures(run: Run, figure: Figure) -> list[Markup]:
    """Of the episode that stands for the run or, in a training, of its best, median and worst."""
    shown: list[Markup] = []
    for title, episode in chosen_episodes(run):
        picture = figure.answer(run, episode)
        if picture is not None:
            shown += [tag("h3", title) if title else Markup(""), _shown(picture)]
    return shown


def chosen_episodes(run: Run) -> list[tuple[str, EpisodeKey]]:
    """The episodes to show, each with a heading unless it is the only one."""
    if not is_training(run):
        key = default_episode(run)
        return [] if key is None else [("", key)]
    names = {key: name for name, key in reversed(notable_episodes(run).items())}
    rows = {
        EpisodeKey(row.env, row.episode, row.attempt): row
        for key in names
        for row in run.rows(EpisodeRow, THIS_EPISODE, key)
    }
    return [
        (
            f"{name.capitalize()} episode: {episode_name(key, trained=True)}, score"
            f" {notation.points(rows[key].val_score)}, twin {notation.points(rows[key].twin_val_score)}",
            key,
        )
        for key, name in reversed(names.items())
    ]


def _shown(picture: Picture, *, is_open: bool = False) -> Markup:
    if not picture.rows:
        return tag("p", picture.caption, class_="aside")
    return tag(
        "figure",
        tag("div", Markup(picture.svg), class_="picture"),
        tag("figcaption", picture.caption),
        tag(
            "details",
            tag("summary", "The numbers"),
            table(picture.columns, picture.rows),
            open="" if is_open else None,
        ),
    )


# --- the diary ------------------------------------------------------------------------------------


def _diary_section(run: Run) -> Iterator[Section]:
    if is_training(run):
        told = chosen_episodes(run)[:1]
        left = 0
    else:
        keys = [episode.key for episode in episodes(run)]
        told = [(episode_name(key, trained=False).capitalize(), key) for key in keys[:MOST_DIARIES]]
        left = len(keys) - len(told)
    if not told:
        return
    parts = []
    for title, key in told:
        notes = diary(run.row, rows_of_episode(run, key))
        heading = tag("h3", title) if len(told) > 1 or is_training(run) else Markup("")
        parts += [heading, _notes(notes) if notes else tag("p", "Nothing grew.", class_="aside")]
    if left:
        parts.append(tag("p", f"{left} more episodes are not told here.", class_="aside"))
    yield Section("diary", "What happened, in words", parts)


def rows_of_episode(run: Run, episode: EpisodeKey) -> list[Row]:
    """What a diary is written from."""
    kinds: tuple[type[Row], ...] = (EpochRow, DecisionRow, TransitionRow, SeedRow, AlertRow, EpisodeRow)
    return [row for kind in kinds for row in run.rows(kind, THIS_EPISODE, episode)]


def _notes(notes: Sequence[Note]) -> Markup:
    return tag("ol", *(_note(note) for note in notes), class_="diary")


def _note(note: Note) -> Markup:
    glyph = tag("span", class_="glyph")
    if note.stage is not None:
        name = note.stage.name.lower()
        glyph = tag("span", LOOKS[note.stage].glyph, class_=f"glyph {name}", title=name)
    parts = (
        tag("span", part, class_="policy_output") if _POLICY_OUTPUT.fullmatch(part) else part
        for part in _POLICY_OUTPUT.split(note.text)
    )
    return tag("li", tag("span", f"epoch {note.epoch}", class_="epoch"), glyph, tag("span", *parts))


# --- where it comes from --------------------------------------------------------------------------


def _origin_sections(row: RunRow, reproduction: str | None) -> Iterator[Section]:
    yield Section("again", "How to do it again", list(_again(row, reproduction)))
    yield Section("configuration", "Configuration", [_pairs(row.config)])
    environment = {
        "git revision": row.git_revision,
        "data hash": row.data_hash,
        "started": row.started,
        "host parameters": row.host_params,
        "slots": row.slots,
        **row.versions,
        **row.hardware,
    }
    yield Section("environment", "Environment", [_pairs(environment)])


def _again(row: RunRow, reproduction: str | None) -> Iterator[Markup]:
    if reproduction is None:
        yield tag("p", "No command began this run; its configuration is below.", class_="aside")
        return
    yield tag("pre", reproduction)
    code = "an unknown revision of the code" if row.git_revision is None else f"revision {row.git_revision}"
    needed = f"The same numbers need {code}, the versions below and the same kind of processor."
    if row.git_revision is not None and row.git_revision.endswith("-dirty"):
        needed += " The code had changes that were not committed, so they are not known."
    yield tag("p", needed, class_="aside")


def _pairs(values: Mapping[str, Any]) -> Markup:
    pairs = (tag("div", tag("dt", name), tag("dd", _value(value))) for name, value in values.items())
    return tag("dl", *pairs, class_="pairs")


def _value(value: Any) -> str:
    return notation.UNKNOWN if value is None else notation.written(value)


# --- markup ---------------------------------------------------------------------------------------


def tag(name: str, *children: str, **attributes: str | None) -> Markup:
    """An element of HTML, with an end even where it is empty; what is no markup is escaped.

    A number stays on one line with its interval.
    """
    kept = (
        child if isinstance(child, Markup) else child.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")
        for child in children
    )
    return element(name, *kept, "", **attributes)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    """A table that scrolls by itself; columns of words are marked, since most hold numbers."""
    numeric = [all(_NUMBER.fullmatch(row[i]) or not row[i] for row in rows) for i in range(len(columns))]
    looks = [None if is_number else "text" for is_number in numeric]
    head = tag("tr", *(tag("th", name, class_=look) for name, look in zip(columns, looks, strict=True)))
    body = [
        tag("tr", *(tag("td", cell, class_=look) for cell, look in zip(row, looks, strict=True)))
        for row in rows
    ]
    inside = tag("table", tag("thead", head), tag("tbody", *body))
    return tag("div", inside, class_="scroll", tabindex="0")
