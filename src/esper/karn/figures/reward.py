"""Is the reward honest: its terms as stacked columns, and the return of episodes against their final score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from esper.karn import notation
from esper.karn.figures import svg
from esper.karn.figures.axes import Scale, alike, around, shared_end, tick_texts, ticks, x_axis, y_axis
from esper.karn.figures.labels import Label, beside_areas
from esper.karn.figures.picture import Picture
from esper.karn.figures.stacks import column, edges, stack
from esper.karn.figures.style import part_look
from esper.karn.figures.svg import Markup
from esper.karn.questions.episodes import EpisodeKey
from esper.karn.questions.reward import Honesty, PaidEpisodes, Reward, RewardPoint, honesty, reward
from esper.karn.run import Run

_LEFT: Final = 62.0
_RIGHT: Final = svg.WIDTH - 190
_TERMS: Final = (14.0, 194.0)
_SCATTER: Final = (14.0, 224.0)


def reward_picture(run: Run, episode: EpisodeKey | None = None) -> Picture | None:
    """The terms of one episode or of the whole run."""
    found = reward(run, episode)
    return None if found is None else draw_reward(found)


def honesty_picture(run: Run, episode: EpisodeKey | None = None) -> Picture | None:
    """Return against score over the whole run, whichever episode is looked at."""
    found = honesty(run)
    return None if found is None else draw_honesty(found)


def reward_beside(run: Run, other: Run) -> Picture | None:
    """The terms of the whole run on axes that hold those of another one too."""
    found = reward(run)
    return None if found is None else draw_reward(found, alike(found, reward(other)))


def honesty_beside(run: Run, other: Run) -> Picture | None:
    """Return against score on axes that hold the episodes of another run too."""
    found = honesty(run)
    return None if found is None else draw_honesty(found, honesty(other))


def draw_reward(found: Reward, beside: Reward | None = None) -> Picture:
    """One column per iteration or epoch, and the sum as a line; the axes hold what is beside it too."""
    x = Scale(0, shared_end(found, beside), _LEFT, _RIGHT)
    stacks = [stack(point.terms) for point in found.points]
    held = [*found.points, *(beside.points if beside else ())]
    y = Scale(*around([0.0, *_reached(held)], 4), _TERMS[1], _TERMS[0])
    line = [
        None if point.total is None else (sum(edges(point.place, x)) / 2, y(point.total))
        for point in found.points
    ]
    columns = [
        svg.path(
            "".join(
                column(point.place, segments[index], x, y)
                for point, segments in zip(found.points, stacks, strict=True)
            ),
            part_look(index),
        )
        for index in range(len(found.terms))
    ]
    last = found.points[-1]
    return Picture(
        svg=svg.drawing(
            _TERMS[1] + 28,
            "Terms of the reward",
            ", ".join(
                f"{term} {notation.gain(paid, 3)}" for term, paid in zip(found.terms, last.terms, strict=True)
            ),
            y_axis(y, _LEFT, _RIGHT),
            *columns,
            x_axis(x, _TERMS[1], found.axis),
            svg.line(_LEFT, y(0), _RIGHT, y(0), "axis"),
            svg.curve(line, "thin"),
            _term_labels(found, y),
        ),
        columns=[found.axis, *found.terms, "return" if found.axis == "iteration" else "reward"],
        rows=[
            [
                str(point.place),
                *(notation.gain(paid, 3) for paid in point.terms),
                notation.gain(point.total, 3),
            ]
            for point in found.points
        ],
        caption=f"What each term paid per {'episode' if found.axis == 'iteration' else 'epoch'}; line: their sum.",
    )


def _reached(points: Sequence[RewardPoint]) -> list[float]:
    """Edges of the columns, and their sums."""
    columns = [value for point in points for segment in stack(point.terms) for value in segment]
    return columns + [point.total for point in points if point.total is not None]


def _term_labels(found: Reward, y: Scale) -> Markup:
    last = found.points[-1]
    labels = [
        Label(f"{svg.shorten(term, 12)} {notation.gain(paid, 2)}", y(sum(segment) / 2), part_look(index))
        for index, (term, paid, segment) in enumerate(
            zip(found.terms, last.terms, stack(last.terms), strict=True)
        )
        if any(point.terms[index] for point in found.points)
    ]
    return beside_areas(_RIGHT + 10, labels, _TERMS[1], _TERMS[0])


def draw_honesty(found: Honesty, beside: Honesty | None = None) -> Picture:
    """A dot per episode or, of many episodes, per group with similar returns; axes hold what is beside it too."""
    groups = found.groups
    held = [*groups, *(beside.groups if beside else ())]
    right = svg.WIDTH - 26
    x = Scale(*around([group.median_return for group in held], 5), _LEFT, right)
    low, high = around([s for group in held for s in (group.quarter, group.three_quarters)], 4, floor=0.0)
    y = Scale(low, min(high, 100.0), _SCATTER[1], _SCATTER[0])
    places = [x(group.median_return) for group in groups]
    spread = "".join(
        f"M{svg.number(at)} {svg.number(y(group.quarter))}V{svg.number(y(group.three_quarters))}"
        for group, at in zip(groups, places, strict=True)
        if group.episodes > 1
    )
    dots = svg.dots((at, y(group.median)) for group, at in zip(groups, places, strict=True))
    correlation = f"rank correlation {notation.gain(found.rank_correlation, 2)}"
    return Picture(
        svg=svg.drawing(
            _SCATTER[1] + 46,
            "Return against final score",
            f"{correlation} over {found.episodes} episodes",
            y_axis(y, _LEFT, right),
            _return_axis(x),
            svg.text(_LEFT + 6, _SCATTER[0] + 10, "score", "dim halo"),
            svg.path(spread, "spread"),
            svg.path(dots, "dot faint"),
            svg.text(right, _SCATTER[1] - 8, correlation, "strong halo", "end"),
        ),
        columns=["episodes", "return", "score 25 %", "score median", "score 75 %"],
        rows=[_cells(group) for group in groups],
        caption=_caption(found),
    )


def _caption(found: Honesty) -> str:
    count = notation.count(found.episodes)
    if all(group.episodes == 1 for group in found.groups):
        return f"One dot per episode, {count} in all."
    return (
        f"{count} episodes in {len(found.groups)} groups of similar return:"
        " median and middle half of their scores."
    )


def _cells(group: PaidEpisodes) -> list[str]:
    low, high = notation.gain(group.low, 2), notation.gain(group.high, 2)
    return [
        notation.count(group.episodes),
        low if group.episodes == 1 else f"{low} to {high}",
        *(notation.points(score) for score in (group.quarter, group.median, group.three_quarters)),
    ]


def _return_axis(x: Scale) -> Markup:
    values: Sequence[float] = ticks(x.low, x.high, 6)
    bottom = _SCATTER[1]
    return svg.group(
        [
            svg.line(x.start, bottom, x.stop, bottom, "axis"),
            *(
                svg.text(x(value), bottom + svg.LINE + 2, label, "dim", "middle")
                for value, label in zip(values, tick_texts(values), strict=True)
            ),
            svg.text(x.stop, bottom + 2 * svg.LINE + 4, "return", "dim", "end"),
        ]
    )
