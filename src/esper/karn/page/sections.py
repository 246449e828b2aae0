"""Sections of a run's page as HTML, shared by report and server; the report is one file with all sections."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from markupsafe import Markup

from esper.karn import notation
from esper.karn.figures import FIGURES, figure_named
from esper.karn.headline import comparison_text, conclude
from esper.karn.metric import SCORE, metric_of
from esper.karn.narrative import narrative_of
from esper.karn.page.rendering import render
from esper.karn.questions import episode_selection
from esper.karn.questions.episode_selection import THIS_EPISODE, EpisodeKey
from esper.karn.run import Run
from esper.karn.run_result import Result, compare, differences, flat, result, verdict_picture
from esper.karn.runs import overview
from esper.leyline import EpisodeRow, EsperError, RunRow

GENERATOR: Final = '<meta name="generator" content="esper report">'
"""Element of the page by which ``esper report`` recognises a report that it may replace."""
MOST_DIARIES: Final = 10
"""Largest number of episodes whose narrative a report contains; the report of a policy training has only the
best episode.
"""
SHOWN: Final = tuple(figure.key for figure in FIGURES)
TITLES: Final = {figure.key: figure.question for figure in FIGURES} | {
    "conclusion": "What does it come to?",
    "comparison": "How does it compare?",
    "diary": "What happened, in words",
    "command": "How to do it again",
    "configuration": "Configuration",
    "environment": "Environment",
}
ORIGIN: Final = ("configuration", "environment")
OF_EPISODE: Final = ("lanes", "diary")
"""Keys of the page sections that show a single episode."""
KEYS: Final = ("conclusion", *SHOWN[: SHOWN.index("lanes") + 1], "diary", *SHOWN[SHOWN.index("lanes") + 1 :])
"""Keys of all page sections in display order, except the sections of the run's settings and software
versions."""


class Section(NamedTuple):
    """One HTML element of a page; on the web server, ``source`` is the address from which the browser reloads
    the element.
    """

    key: str
    body: Markup
    side: str = ""
    """Suffix of the element's HTML id, which keeps ids unique if two runs are shown side by side."""
    source: str = ""
    runs: str = ""
    """Ids of the runs that the page section shows."""

    @property
    def of_episode(self) -> bool:
        return self.key in OF_EPISODE


Group = tuple[str, Sequence[Section]]
"""CSS class of a grid, and the page sections that are arranged in it."""


def section(key: str, kind: str, found: Any, **more: Any) -> Markup:
    """Render a page section; ``kind`` is one of the kinds that the template ``section.html`` defines."""
    return render("section.html", key=key, title=TITLES[key], kind=kind, found=found, **more)


def empty(key: str) -> Markup:
    """Return a page section with only its title; the browser loads the content later."""
    return Markup("<h2>{}</h2>").format(TITLES[key])


def head(run: Run, name: str, *, served: bool) -> Markup:
    """Render the head of a run's page: name, progress, score and open alerts."""
    return render("head.html", overview=overview(run), name=name, served=served)


def run_section(run: Run, key: str, episode: EpisodeKey | None = None, compared: Run | None = None) -> Markup:
    """Render one section of a run's page for the web server.

    Args:
        run: Run to show.
        key: Key of the section, such as "lanes".
        episode: Episode to show; None shows the best episode of a policy training, or the last episode of any
            other run.
        compared: Second run whose values the axes of the chart include.
    """
    if key == "conclusion":
        return section(key, "conclusion", conclude(run))
    if key in ORIGIN:
        return section(key, "pairs", settings(run.row, key))
    if key not in OF_EPISODE:
        return section(key, "figure", figure_named(key).answer(run, compared=compared))
    shown = episode_selection.default_episode(run) if episode is None else episode
    choice = chooser(run, shown) if shown and key == "lanes" and compared is None else None
    return _of_episodes(run, key, [] if shown is None else [("", shown)], compared, chooser=choice)


def _of_episodes(
    run: Run, key: str, episodes: Sequence[tuple[str, EpisodeKey]], compared: Run | None = None, **more: Any
) -> Markup:
    """Render the charts of slots or the narratives of episodes, each with its heading."""
    if key == "lanes":
        lanes = [(title, figure_named(key).answer(run, episode, compared)) for title, episode in episodes]
        return section(key, "episodes", [one for one in lanes if one[1] is not None or not one[0]], **more)
    notes = [(title, narrative_of(run, episode)) for title, episode in episodes]
    return section(key, "episodes", notes, **more)


def render_report(run: Run, against: Sequence[Run] = (), reproduction: str | None = None) -> str:
    """Render the report of a run as HTML.

    Args:
        run: Run to report.
        against: Runs to compare the reported run with.
        reproduction: Shell command that repeats the run; None if no command started the run.
    """
    conclusion = conclude(run, [compare(run, other) for other in against])
    bodies = {"conclusion": section("conclusion", "conclusion", conclusion)}
    if against:
        bodies["comparison"] = comparison(arm_names([run, *against]))
    bodies |= {key: reported_section(run, key) for key in KEYS[1:]}
    origin = {"command": command(run.row, reproduction)}
    origin |= {key: run_section(run, key) for key in ORIGIN}
    panels, details = ([Section(key, body) for key, body in one.items()] for one in (bodies, origin))
    opening = [Section("", head(run, run.row.name, served=False))]
    return render(
        "run.html",
        generator=Markup(GENERATOR),
        title=f"{run.row.name}: {run.row.task}, {run.row.controller}",
        served=False,
        path=run.path,
        groups=[("heads", opening), ("panels", panels), ("origin", details)],
    )


def reported_section(run: Run, key: str) -> Markup:
    """Render one section of the report of a run.

    The report section "lanes" shows the slots of the last episode; for a policy training, those of the best,
    median and worst episode. The report section "diary" has the narratives of the first episodes; for a
    policy training, only that of the best episode.
    """
    if key not in OF_EPISODE:
        return run_section(run, key)
    if key == "lanes" or run.is_training:
        return _of_episodes(run, key, chosen_episodes(run)[: 1 if key == "diary" else None])
    keys = [episode.key for episode in episode_selection.episodes(run)]
    notes = [(episode_selection.episode_name(run, key).capitalize(), key) for key in keys[:MOST_DIARIES]]
    if len(notes) == 1:
        notes = [("", keys[0])]
    return _of_episodes(run, "diary", notes, left=len(keys) - len(notes))


def chosen_episodes(run: Run) -> list[tuple[str, EpisodeKey]]:
    """Return the episodes whose slots a report shows, each with a heading. A run without policy
    training has one episode, whose heading in the report is empty.
    """
    if not run.is_training:
        key = episode_selection.default_episode(run)
        return [] if key is None else [("", key)]
    found = []
    for name, key in episode_selection.notable_episodes(run).items():
        (row,) = run.rows(EpisodeRow, THIS_EPISODE, key)
        scores = f"score {notation.points(row.val_score)}, twin {notation.points(row.twin_val_score)}"
        place = episode_selection.episode_name(run, key)
        found.append((f"{name.capitalize()} episode: {place}, {scores}", key))
    return found


# --- episode selection ------------------------------------------------------------------------------


def chooser(run: Run, shown: EpisodeKey) -> dict[str, Any]:
    """Return all episodes of a run, and those before and after ``shown``, for the links of its page."""
    found = episode_selection.episodes(run)
    keys = [episode.key for episode in found]
    at = keys.index(shown) if shown in keys else -1
    return {
        "before": keys[at - 1] if at > 0 else None,
        "after": keys[at + 1] if 0 <= at < len(keys) - 1 else None,
        "episodes": found,
        "shown": shown,
        "metric": metric_of(run.row),
    }


def parse_episode(text: str | None) -> EpisodeKey | None:
    """Parse the value of ``at`` in the query string to the key of an episode; None if the value is empty.
    Raises ``EsperError`` unless the value has the form ``0-3-0``.
    """
    if not text:
        return None
    try:
        env, episode, attempt = (int(part) for part in text[:80].split("-"))
    except ValueError:
        raise EsperError("an episode is named by env, episode and attempt, such as ?at=0-3-0") from None
    return EpisodeKey(env, episode, attempt)


# --- comparison of runs -----------------------------------------------------------------------------


def comparison(runs: Mapping[str, Run], *, in_words: bool = False) -> Markup:
    """Render a page section that compares the first run with all others.

    Args:
        runs: Runs to compare, by display name.
        in_words: Whether to add a sentence that compares the first run with the last run.
    """
    (first, run), *others = runs.items()
    rows, sentence = [_arm(first, run.row, result(run), "", "")], ""
    metric = metric_of(run.row)
    for name, other in others:
        found = compare(run, other)
        sentence = comparison_text(found) if in_words else ""
        leads = metric.difference(found.validation), SCORE.difference(found.test_score)
        rows.append(_arm(name, other.row, found.result, *leads))
    return section(
        "comparison",
        "comparison",
        verdict_picture(runs),
        sentence=sentence,
        rows=rows,
        settings=["setting", *runs],
        differences=[[key, *map(notation.written, values)] for key, values in differences(runs).items()],
    )


def arm_names(runs: Sequence[Run]) -> dict[str, Run]:
    """Return runs by name; a number is appended to names that occur more than once."""
    named: dict[str, Run] = {}
    for run in runs:
        name, number = run.row.name, 1
        while name in named:
            number += 1
            name = f"{run.row.name} ({number})"
        named[name] = run
    return named


def _arm(name: str, row: RunRow, found: Result | None, val_ahead: str, test_ahead: str) -> list[str]:
    origin = f"{name} ({row.controller}, rng seed {notation.written(row.rng_seed)})"
    if found is None:
        return [origin, "0", *[notation.UNKNOWN] * 7]
    validation, test = found.metric.estimate(found.validation), SCORE.estimate(found.estimate("test_score"))
    costs = [notation.flop(found.flops), notation.flop(found.mean("flops_per_sample"))]
    params = notation.count(round(found.mean("params")))
    return [origin, notation.count(len(found.rows)), validation, val_ahead, test, test_ahead, params, *costs]


# --- origin of a run --------------------------------------------------------------------------------


def settings(row: RunRow, key: str) -> list[tuple[str, str]]:
    """Return the configuration or the origin of a run as pairs (name, text); nested names are joined by
    dots.
    """
    values = row.config
    if key == "environment":
        values = {"git revision": row.git_revision, "data hash": row.data_hash, "started": row.started}
        values |= {"host parameters": row.host_params, "slots": row.slots, **row.versions, **row.hardware}
    return [(name, notation.written(value)) for key in values for name, value in flat(key, values[key])]


def command(row: RunRow, reproduction: str | None) -> Markup:
    """Render the command that repeats the run, and a note on what is needed to get the same numbers."""
    return section("command", "command", reproduction, revision=row.git_revision or "")
