"""The sections of a run's page. Report and server ask for the same ones; both get them as HTML."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from markupsafe import Markup

from esper.karn import notation
from esper.karn.figures import FIGURES, figure_named
from esper.karn.headline import comparison_text, conclude, gain_text
from esper.karn.metric import SCORE, metric_of
from esper.karn.narrative import narrative_of
from esper.karn.page.rendering import render
from esper.karn.questions.episode_selection import (
    THIS_EPISODE,
    EpisodeKey,
    default_episode,
    episode_name,
    episodes,
    is_training,
    notable_episodes,
)
from esper.karn.questions.overview import overview
from esper.karn.questions.verdict import verdict_picture
from esper.karn.run import Run
from esper.karn.run_result import Result, compare, differences, flat, result
from esper.leyline.errors import EsperError
from esper.leyline.events import EpisodeRow, RunRow

MOST_DIARIES: Final = 10
"""Episodes of a run that a report tells; of a training it tells the best."""
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
"""Sections about one episode."""
KEYS: Final = ("conclusion", *SHOWN[: SHOWN.index("lanes") + 1], "diary", *SHOWN[SHOWN.index("lanes") + 1 :])
"""Sections of a page in their order, before what was set."""


class Section(NamedTuple):
    """One element of a page; a served one names the address that it is renewed from."""

    key: str
    body: Markup
    tag: str = "section"
    look: str = "panel"
    side: str = ""
    """Tells the two sections of one key apart, where runs stand side by side."""
    source: str = ""
    runs: str = ""
    """Ids of the runs that it is about."""

    @property
    def of_episode(self) -> bool:
        return self.key in OF_EPISODE


class Group(NamedTuple):
    """Sections that stand in one grid."""

    look: str
    sections: Sequence[Section]


def section(key: str, kind: str, found: Any, **more: Any) -> Markup:
    """A section of one of the kinds that the template knows."""
    return render("section.html", key=key, title=TITLES[key], kind=kind, found=found, **more)


def empty(key: str) -> Markup:
    """A section that is loaded when somebody comes to it."""
    return Markup("<h2>{}</h2>").format(TITLES[key])


def head(run: Run, name: str, *, served: bool) -> Markup:
    """What is run, how far it is, and what is wrong."""
    return render("head.html", overview=overview(run), name=name, served=served)


def run_section(run: Run, key: str, episode: EpisodeKey | None = None, beside: Run | None = None) -> Markup:
    """A section of a served page: of the chosen episode and beside another run, if there are any."""
    if key == "conclusion":
        return section(key, "conclusion", conclude(run))
    if key in ORIGIN:
        return section(key, "pairs", settings(run.row, key))
    if key not in OF_EPISODE:
        return section(key, "figure", figure_named(key).answer(run, beside=beside))
    shown = default_episode(run) if episode is None else episode
    choice = chooser(run, shown) if shown and key == "lanes" and beside is None else None
    return _of_episodes(run, key, [] if shown is None else [("", shown)], beside, chooser=choice)


def _of_episodes(
    run: Run, key: str, episodes: Sequence[tuple[str, EpisodeKey]], beside: Run | None = None, **more: Any
) -> Markup:
    """The lanes or the diaries of episodes, each with its heading."""
    if key == "lanes":
        lanes = [(title, figure_named(key).answer(run, episode, beside)) for title, episode in episodes]
        return section(key, "episodes", [one for one in lanes if one[1] is not None or not one[0]], **more)
    told = [(title, narrative_of(run, episode)) for title, episode in episodes]
    return section(key, "episodes", told, **more)


def reported_lanes(run: Run) -> Markup:
    """Of the episode that a run is shown by or, of a training, of its best, median and worst."""
    return _of_episodes(run, "lanes", chosen_episodes(run))


def reported_diary(run: Run) -> Markup:
    """Of the first episodes or, of a training, of its best."""
    if is_training(run):
        return _of_episodes(run, "diary", chosen_episodes(run)[:1])
    keys = [episode.key for episode in episodes(run)]
    told = [(episode_name(key, trained=False).capitalize(), key) for key in keys[:MOST_DIARIES]]
    if len(told) == 1:
        told = [("", keys[0])]
    return _of_episodes(run, "diary", told, left=len(keys) - len(told))


def chosen_episodes(run: Run) -> list[tuple[str, EpisodeKey]]:
    """The episodes to show, each with a heading unless it is the only one."""
    if not is_training(run):
        key = default_episode(run)
        return [] if key is None else [("", key)]
    names = {key: name for name, key in reversed(notable_episodes(run).items())}
    found = []
    for key, name in reversed(names.items()):
        (row,) = run.rows(EpisodeRow, THIS_EPISODE, key)
        scores = f"score {notation.points(row.val_score)}, twin {notation.points(row.twin_val_score)}"
        found.append((f"{name.capitalize()} episode: {episode_name(key, trained=True)}, {scores}", key))
    return found


# --- choosing an episode: by iteration or episode, then by environment, or step by step ---------------


Choice = tuple[str, str, bool]
"""One entry of a list: its address, its text, and whether it is chosen."""


class Chooser(NamedTuple):
    """What can be chosen beside the episode that is shown; addresses are as ``at`` of a page's query."""

    before: str | None
    after: str | None
    groups: list[Choice]
    """Iterations, or episodes where nothing is trained."""
    members: list[Choice]
    """Environments and attempts of the same iteration or episode."""


def chooser(run: Run, shown: EpisodeKey) -> Chooser:
    """For a page that shows this episode."""
    found, metric = episodes(run), metric_of(run.row)
    keys = [episode.key for episode in found]
    at = keys.index(shown) if shown in keys else -1
    first = {episode.key.episode: episode for episode in reversed(found)}
    own = {key for key in keys if key.episode == shown.episode}
    return Chooser(
        before=address(keys[at - 1]) if at > 0 else None,
        after=address(keys[at + 1]) if 0 <= at < len(keys) - 1 else None,
        groups=[
            (address(key), f"episode {key.episode}" if number is None else f"iteration {number}", key in own)
            for key, number, _ in reversed(first.values())
        ],
        members=[
            (address(key), f"env {key.env}{_attempt(key)} · {metric.text(score)}", key == shown)
            for key, _, score in found
            if key in own
        ],
    )


def _attempt(key: EpisodeKey) -> str:
    return f", attempt {key.attempt + 1}" if key.attempt else ""


def address(key: Iterable[int]) -> str:
    """An episode as a query names it."""
    return "-".join(map(str, key))


def parse_episode(text: str | None) -> EpisodeKey | None:
    if not text:
        return None
    try:
        env, episode, attempt = (int(part) for part in text[:80].split("-"))
    except ValueError:
        raise EsperError("an episode is named by env, episode and attempt, such as ?at=0-3-0") from None
    return EpisodeKey(env, episode, attempt)


# --- several runs ---------------------------------------------------------------------------------


def comparison(runs: Mapping[str, Run], *, in_words: bool = False) -> Markup:
    """The first run against all others, by their names; ``in_words``: with a sentence about the last one."""
    (first, run), *others = runs.items()
    rows, sentence = [_arm(first, run.row, result(run), "", "")], ""
    metric = metric_of(run.row)
    for name, other in others:
        found = compare(run, other)
        sentence = comparison_text(found) if in_words else ""
        ahead = [(found.validation, metric), (found.test_score, SCORE)]
        texts = [notation.UNKNOWN if lead is None else gain_text(lead, by) for lead, by in ahead]
        rows.append(_arm(name, other.row, found.result, *texts))
    return section(
        "comparison",
        "comparison",
        verdict_picture(runs),
        sentence=sentence,
        columns=["run", "episodes", "validation", "ahead", "test", "ahead", "parameters", "compute"],
        rows=rows,
        settings=["setting", *runs],
        differences=[[key, *map(setting_text, values)] for key, values in differences(runs).items()],
    )


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


def _arm(name: str, row: RunRow, found: Result | None, val_ahead: str, test_ahead: str) -> list[str]:
    origin = f"{name} ({row.controller}, rng seed {setting_text(row.rng_seed)})"
    if found is None:
        return [origin, "0", *[notation.UNKNOWN] * 6]
    validation, test = found.metric.estimate(found.validation), SCORE.estimate(found.test_score)
    costs = [notation.count(round(found.params.mean)), notation.flop(round(found.flops.mean))]
    return [origin, notation.count(found.episodes), validation, val_ahead, test, test_ahead, *costs]


# --- where a run comes from -----------------------------------------------------------------------


def settings(row: RunRow, key: str) -> list[tuple[str, str]]:
    """The configuration, or where, when and from what the run was made; names within others have dots."""
    values = row.config
    if key == "environment":
        values = {"git revision": row.git_revision, "data hash": row.data_hash, "started": row.started}
        values |= {"host parameters": row.host_params, "slots": row.slots, **row.versions, **row.hardware}
    return [(name, setting_text(value)) for key in values for name, value in flat(key, values[key])]


def setting_text(value: object) -> str:
    """A setting as it would be written; "–" where there is none."""
    return notation.UNKNOWN if value is None else notation.written(value)


def command(row: RunRow, reproduction: str | None) -> Markup:
    """The command that does the same again, and what it needs."""
    if reproduction is None:
        note = "No command began this run; its configuration is below."
    else:
        revision = row.git_revision or ""
        code = f"revision {revision}" if revision else "an unknown revision of the code"
        note = f"The same numbers need {code}, the versions below and the same kind of processor."
        if revision.endswith("-dirty"):
            note += " The code had changes that were not committed, so they are not known."
    return section("command", "command", reproduction, note=note)
