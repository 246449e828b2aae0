"""Choosing one episode of a run: by iteration or episode, then by environment, or step by step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from esper.karn import notation
from esper.karn.questions.episodes import EpisodeKey, EpisodeSummary, episodes
from esper.karn.run import Run
from esper.leyline.errors import EsperError


class Choice(NamedTuple):
    """One entry of a list."""

    at: str
    text: str
    chosen: bool


@dataclass(frozen=True, slots=True)
class Chooser:
    """What can be chosen beside the episode that is shown; addresses are as ``at`` of a page's query."""

    before: str | None
    after: str | None
    groups: list[Choice]
    """Iterations, or episodes where nothing is trained."""
    members: list[Choice]
    """Environments and attempts of the same iteration or episode."""


def chooser(run: Run, shown: EpisodeKey) -> Chooser:
    """For a page that shows this episode."""
    found = episodes(run)
    keys = [episode.key for episode in found]
    at = keys.index(shown) if shown in keys else -1
    first = {episode.key.episode: episode for episode in reversed(found)}
    members = [episode for episode in found if episode.key.episode == shown.episode]
    return Chooser(
        before=address(keys[at - 1]) if at > 0 else None,
        after=address(keys[at + 1]) if 0 <= at < len(keys) - 1 else None,
        groups=[
            Choice(address(episode.key), _group_name(episode), episode.key.episode == shown.episode)
            for episode in reversed(first.values())
        ],
        members=[Choice(address(one.key), _member_name(one), one.key == shown) for one in members],
    )


def _group_name(episode: EpisodeSummary) -> str:
    if episode.iteration is not None:
        return f"iteration {episode.iteration}"
    return f"episode {episode.key.episode}"


def _member_name(episode: EpisodeSummary) -> str:
    attempt = f", attempt {episode.key.attempt + 1}" if episode.key.attempt else ""
    return f"env {episode.key.env}{attempt} · {notation.points(episode.score)}"


def address(key: Iterable[int]) -> str:
    """An episode as a query names it."""
    return "-".join(map(str, key))


def episode_at(text: str | None) -> EpisodeKey | None:
    """The episode that a query names, if it does."""
    if not text:
        return None
    try:
        env, episode, attempt = (int(part) for part in text[:80].split("-"))
    except ValueError:
        raise EsperError("an episode is named by env, episode and attempt, such as ?at=0-3-0") from None
    return EpisodeKey(env, episode, attempt)
