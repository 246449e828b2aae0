"""Are seeds worth their cost: a funnel per blueprint, and its contribution per 1,000 parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from esper.karn import notation
from esper.karn.figures import svg
from esper.karn.figures.axes import Scale, around, tick_texts, ticks
from esper.karn.figures.picture import Picture
from esper.karn.figures.svg import Markup
from esper.karn.questions.episodes import EpisodeKey
from esper.karn.questions.worth import BlueprintWorth, worth
from esper.karn.run import Run
from esper.leyline.stages import Stage

_ROW: Final = 46.0
_TOP: Final = 26.0
_FUNNEL: Final = (0.0, 326.0)
_POINTS: Final = (352.0, 492.0)


def worth_picture(run: Run, episode: EpisodeKey | None = None) -> Picture | None:
    """The answer of one episode or of the whole run."""
    found = worth(run, episode)
    return None if found is None else draw_worth(found)


def worth_beside(run: Run, other: Run) -> Picture | None:
    """The whole run on scales that hold another one too."""
    found = worth(run)
    return None if found is None else draw_worth(found, worth(other) or ())


def draw_worth(found: Sequence[BlueprintWorth], beside: Sequence[BlueprintWorth] = ()) -> Picture:
    """One row per blueprint, on scales that hold what is beside it too."""
    bottom = _TOP + _ROW * len(found)
    count = Scale(0, max(one.germinated for one in (*found, *beside)), *_FUNNEL)
    points = _points_scale([*found, *beside])
    return Picture(
        svg=svg.drawing(
            bottom + 24,
            "Seeds by blueprint",
            "; ".join(f"{one.blueprint}: {one.fossilized} of {one.germinated} kept" for one in found),
            svg.text(0, 13, "seeds, by how far they came", "dim"),
            svg.text(svg.WIDTH, 13, "points per 1,000 params", "dim", "end"),
            *([] if points is None else _points_axis(points, bottom)),
            *(_draw_row(one, _TOP + _ROW * index, count, points) for index, one in enumerate(found)),
        ),
        columns=[
            "blueprint",
            "germinated",
            "blended",
            "held",
            "fossilized",
            "pruned",
            "measured",
            "contribution",
            "parameters",
            "per 1,000 parameters",
        ],
        rows=[_cells(one) for one in found],
        caption=(
            "From the left: seeds that fossilized, were held, blended, only trained. Contribution: score lost"
            " without the seed when it was last measured; mean ± standard error over seeds."
        ),
    )


def _cells(one: BlueprintWorth) -> list[str]:
    return [
        one.blueprint,
        *(notation.count(n) for n in (one.germinated, one.blended, one.held, one.fossilized, one.pruned)),
        notation.count(one.measured),
        notation.gain_with_error(one.contribution, one.contribution_error),
        notation.count(None if one.params is None else round(one.params)),
        notation.gain_with_error(one.per_thousand, one.per_thousand_error),
    ]


def _points_scale(found: Sequence[BlueprintWorth]) -> Scale | None:
    known = [one for one in found if one.per_thousand is not None]
    if not known:
        return None
    ends = [
        (one.per_thousand or 0.0) + side * (one.per_thousand_error or 0.0)
        for one in known
        for side in (-1, 1)
    ]
    return Scale(*around([0.0, *ends], 3), *_POINTS)


def _points_axis(points: Scale, bottom: float) -> Iterator[Markup]:
    values = ticks(points.low, points.high, 4)
    for value, label in zip(values, tick_texts(values), strict=True):
        yield svg.line(points(value), _TOP, points(value), bottom, "axis" if value == 0 else "grid")
        yield svg.text(points(value), bottom + svg.LINE, label, "dim", "middle")


def _draw_row(one: BlueprintWorth, top: float, count: Scale, points: Scale | None) -> Markup:
    """The furthest stages as parts of one bar: what is left of an edge came at least that far."""
    reached = [
        (Stage.FOSSILIZED, 0, one.fossilized),
        (Stage.HOLDING, one.fossilized, one.held),
        (Stage.BLENDING, one.held, one.blended),
        (Stage.TRAINING, one.blended, one.germinated),
    ]
    bars = [
        svg.rectangle(count(start), top + 23, count(end) - count(start), 12, stage.name.lower())
        for stage, start, end in reached
        if end > start
    ]
    fates = f"{notation.count(one.fossilized)} kept, {notation.count(one.pruned)} pruned"
    name = svg.shorten(one.blueprint, 15)
    return svg.group(
        [
            svg.text(0, top + 16, name, "strong"),
            svg.text(_FUNNEL[1] + 6, top + 16, fates, "dim", "end"),
            *bars,
            *_draw_points(one, top + 29, points),
            svg.element("title", f"{one.blueprint}: {notation.count(one.germinated)} germinated, {fates}"),
        ]
    )


def _draw_points(one: BlueprintWorth, y: float, points: Scale | None) -> Iterator[Markup]:
    text = notation.gain_with_error(one.per_thousand, one.per_thousand_error)
    yield svg.text(svg.WIDTH, y + 4, text, "" if one.per_thousand is not None else "dim", "end")
    if points is None or one.per_thousand is None:
        return
    if one.per_thousand_error is not None:
        start, end = (points(one.per_thousand + side * one.per_thousand_error) for side in (-1, 1))
        yield svg.line(start, y, end, y, "thin")
    yield svg.path(svg.dots([(points(one.per_thousand), y)]), "dot")
