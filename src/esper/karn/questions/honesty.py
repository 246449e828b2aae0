"""Chart of the return of every episode against its gain in score, to detect a reward that favours worse
networks.

The gain of an episode is its final score minus the twin's final score if all twins are known, else its final
score. The alert ``pays-for-worse`` uses the rank correlation of an episode's return and its gain in score.
"""

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from esper.karn import notation
from esper.karn.drawing import svg
from esper.karn.drawing.axes import LEFT, TOP, AxisScale, around, tick_texts, ticks, value_axis, y_axis
from esper.karn.drawing.picture import Picture
from esper.karn.run import Run
from esper.leyline.rank_correlation import Rewarded, gains, reward_correlation
from esper.leyline.thresholds import CORRELATED_EPISODES

MOST_EPISODES: Final = 160
"""Largest number of episodes that are drawn as single dots; more episodes are grouped by return."""
GROUPS: Final = 40
_RIGHT: Final = svg.WIDTH - 26
_BOTTOM: Final = 224.0


class ReturnGroup(NamedTuple):
    """Group of episodes with similar returns."""

    episodes: int
    low: float
    high: float
    """Lowest and highest return in a group of episodes."""
    median_return: float
    quarter: float
    median: float
    three_quarters: float
    """Quartiles of the gains in score in a group of episodes."""


class Honesty(NamedTuple):
    """Relation between the returns of a training's episodes and their gains in score."""

    episodes: int
    gain: str
    """Name of the gain: ``lead`` if it is the difference from the twin's score, ``score`` if it is the final
    score.
    """
    rank_correlation: float | None
    """Spearman's rank correlation of return and gain in score; None for fewer than three episodes or if all
    values are equal.
    """
    recent: float | None
    """Rank correlation of return and gain in score over the last ``CORRELATED_EPISODES`` episodes, as in the
    alert ``pays-for-worse``; None if there are fewer episodes.
    """
    groups: tuple[ReturnGroup, ...]
    """Groups of episodes by increasing return; each group has a single episode if there are few episodes."""


def honesty(run: Run) -> Honesty | None:
    """Return how the returns of episodes relate to their gains in score; None if no episode has a reward."""
    found = run.fetch(
        "SELECT total_reward, val_score, twin_val_score FROM episode"
        " WHERE total_reward IS NOT NULL ORDER BY t"
    )
    if not found:
        return None
    rewarded = [Rewarded(*values) for values in found]
    latest = rewarded[-CORRELATED_EPISODES:]
    return Honesty(
        episodes=len(rewarded),
        gain="score" if any(one.twin_val_score is None for one in rewarded) else "lead",
        rank_correlation=reward_correlation(rewarded),
        recent=reward_correlation(latest) if len(latest) == CORRELATED_EPISODES else None,
        groups=tuple(_groups(rewarded)),
    )


def _groups(rewarded: Sequence[Rewarded]) -> list[ReturnGroup]:
    """Split the episodes into groups of equal size by return."""
    pairs = sorted(zip((one.total_reward for one in rewarded), gains(rewarded), strict=True))
    parts = len(pairs) if len(pairs) <= MOST_EPISODES else GROUPS
    edges = [index * len(pairs) // parts for index in range(parts + 1)]
    return [_group(pairs[start:end]) for start, end in pairwise(edges)]


def _group(pairs: Sequence[tuple[float, float]]) -> ReturnGroup:
    returns, gained = zip(*pairs, strict=True)
    quartiles = statistics.quantiles(gained, n=4, method="inclusive") if len(gained) > 1 else gained * 3
    return ReturnGroup(len(pairs), returns[0], returns[-1], statistics.median(returns), *quartiles)


def draw_honesty(found: Honesty, compared: Honesty | None = None) -> Picture:
    """Draw return against gain in score: a dot per episode, or per group of episodes if there are many."""
    groups = found.groups
    held = [*groups, *(compared.groups if compared else ())]
    x = AxisScale(*around([group.median_return for group in held], 5), LEFT, _RIGHT)
    low, high = around([s for group in held for s in (group.quarter, group.three_quarters)], 4, floor=0.0)
    y = AxisScale(low, min(high, 100.0), _BOTTOM, TOP)
    positions = [x(group.median_return) for group in groups]
    spread = "".join(
        f"M{svg.number(at)} {svg.number(y(group.quarter))}V{svg.number(y(group.three_quarters))}"
        for group, at in zip(groups, positions, strict=True)
        if group.episodes > 1
    )
    dots = svg.dots((at, y(group.median)) for group, at in zip(groups, positions, strict=True))
    correlation = f"rank correlation {notation.gain(found.rank_correlation, 2)}"
    return Picture(
        svg=svg.drawing(
            _BOTTOM + 46,
            f"Return against {_gain_name(found)}",
            f"{correlation} over {found.episodes} episodes",
            y_axis(y, LEFT, _RIGHT),
            value_axis(x, _BOTTOM, "return", tick_texts(ticks(x.low, x.high, 6))),
            svg.text(LEFT + 6, TOP + 10, _gain_name(found), "dim halo"),
            svg.path(spread, "spread"),
            svg.path(dots, "dot faint"),
            svg.text(_RIGHT, _BOTTOM - 8, correlation, "strong halo", "end"),
        ),
        columns=["episodes", "return", *(f"{found.gain} {name}" for name in ("25 %", "median", "75 %"))],
        rows=[_cells(group) for group in groups],
        caption=_caption(found),
    )


def _gain_name(found: Honesty) -> str:
    return "lead over the twin" if found.gain == "lead" else "final score"


def _caption(found: Honesty) -> str:
    count = notation.count(found.episodes)
    if all(group.episodes == 1 for group in found.groups):
        shown = f"One dot per episode, {count} in all."
    else:
        shown = (
            f"{count} episodes in {len(found.groups)} groups of similar return:"
            f" median and middle half of their {_gain_name(found)}."
        )
    recent = notation.gain(found.recent, 2)
    return f"{shown} Over the last {CORRELATED_EPISODES} episodes, which the alert watches: {recent}."


def _cells(group: ReturnGroup) -> list[str]:
    low, high = notation.gain(group.low, 2), notation.gain(group.high, 2)
    return [
        notation.count(group.episodes),
        low if group.episodes == 1 else f"{low} to {high}",
        *(notation.points(score) for score in (group.quarter, group.median, group.three_quarters)),
    ]
