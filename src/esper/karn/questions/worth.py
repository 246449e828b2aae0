"""Cost and benefit of seeds by blueprint: stages reached, and contribution per 1,000 parameters.

Drawn as a funnel per blueprint with its contribution.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from markupsafe import Markup

from esper.karn import notation
from esper.karn.drawing import svg
from esper.karn.drawing.axes import AxisScale, around, tick_texts, ticks
from esper.karn.drawing.picture import Picture
from esper.karn.metric import Metric, metric_of
from esper.karn.run import Run
from esper.leyline.stages import Stage

_ROW: Final = 46.0
_TOP: Final = 26.0
_FUNNEL: Final = (0.0, 326.0)
_POINTS: Final = (352.0, 492.0)


class BlueprintWorth(NamedTuple):
    """All seeds of one blueprint; None is unknown."""

    blueprint: str
    metric: Metric
    germinated: int
    blended: int
    held: int
    fossilized: int
    """Number of seeds that reached the stage; each count includes the next."""
    pruned: int
    measured: int
    """Number of seeds with a measured contribution; each counts with its last measurement."""
    contribution: float | None
    """Mean contribution by the run's metric."""
    contribution_error: float | None
    """Standard error over seeds; for a single seed, the error of its measurement."""
    params: float | None
    """Mean parameters of the seeds whose parameters were recorded."""
    per_thousand: float | None
    """Contribution per 1,000 parameters, over measured seeds with recorded parameters."""
    per_thousand_error: float | None


def worth(run: Run) -> tuple[BlueprintWorth, ...] | None:
    """Return one entry per blueprint, the most germinated first; None if no seed germinated."""
    found = run.sql(
        f"""
        WITH moves AS (SELECT * FROM transition WHERE seed >= 0),
        reached AS (
            SELECT env, episode, attempt, seed, any_value(blueprint) AS blueprint,
                   bool_or(to_stage = {Stage.BLENDING:d}) AS blended,
                   bool_or(to_stage = {Stage.HOLDING:d}) AS held,
                   bool_or(to_stage = {Stage.FOSSILIZED:d}) AS fossilized,
                   bool_or(to_stage = {Stage.PRUNED:d}) AS pruned,
                   arg_max(contribution, epoch) FILTER (contribution IS NOT NULL) AS contribution
            FROM moves GROUP BY env, episode, attempt, seed),
        measured AS (
            SELECT env, episode, attempt, seed, any_value(params) AS params,
                   arg_max((contribution, contribution_error), epoch)
                       FILTER (contribution IS NOT NULL) AS last
            FROM seed GROUP BY env, episode, attempt, seed),
        known AS (
            SELECT reached.* EXCLUDE (contribution), measured.params,
                   CASE WHEN last IS NULL THEN reached.contribution ELSE last[1] END AS points,
                   last[2] AS error,
                   CASE WHEN points IS NOT NULL AND measured.params > 0 THEN measured.params END AS size,
                   CASE WHEN size IS NOT NULL THEN points END AS sized
            FROM reached LEFT JOIN measured USING (env, episode, attempt, seed))
        SELECT blueprint, count(*), count(*) FILTER (blended), count(*) FILTER (held),
               count(*) FILTER (fossilized), count(*) FILTER (pruned), count(points), avg(points),
               CASE WHEN count(points) > 1 THEN stddev_samp(points) / sqrt(count(points))
                    ELSE any_value(error) END,
               avg(params),
               1000 * sum(sized) / sum(size),
               CASE WHEN count(sized) > 1 THEN 1000 * stddev_samp(sized) * sqrt(count(sized)) / sum(size)
                    ELSE 1000 * any_value(error) / sum(size) END
        FROM known GROUP BY blueprint ORDER BY count(*) DESC, blueprint
        """
    ).fetchall()
    names, metric = run.row.blueprints, metric_of(run.row)
    return tuple(BlueprintWorth(names[blueprint], metric, *values) for blueprint, *values in found) or None


def draw_worth(found: Sequence[BlueprintWorth], compared: Sequence[BlueprintWorth] | None = None) -> Picture:
    """Draw one row per blueprint, on scales that include a second run if given."""
    held = [*found, *(compared or ())]
    bottom = _TOP + _ROW * len(found)
    count = AxisScale(0, max(one.germinated for one in held), *_FUNNEL)
    points, metric = _points_scale(held), found[0].metric
    unit = metric.unit.strip() or metric.name
    counted = ("germinated", "blended", "held", "fossilized", "pruned", "measured")
    return Picture(
        svg.drawing(
            bottom + 24,
            "Seeds by blueprint",
            "; ".join(f"{one.blueprint}: {one.fossilized} of {one.germinated} kept" for one in found),
            svg.text(0, 13, "seeds, by how far they came", "dim"),
            svg.text(svg.WIDTH, 13, f"{unit} per 1,000 params", "dim", "end"),
            *([] if points is None else _points_axis(points, bottom)),
            *(_draw_row(one, _TOP + _ROW * index, count, points) for index, one in enumerate(found)),
        ),
        ["blueprint", *counted, "contribution", "parameters", "per 1,000 parameters"],
        [
            [
                one.blueprint,
                *(notation.count(getattr(one, name)) for name in counted),
                metric.gain_with_error(one.contribution, one.contribution_error),
                notation.count(None if one.params is None else round(one.params)),
                metric.gain_with_error(one.per_thousand, one.per_thousand_error),
            ]
            for one in found
        ],
        "From the left: seeds that fossilized, were held, blended, only trained. Contribution:"
        f" {metric.lost} without the seed when it was last measured; mean ± standard error over seeds.",
    )


def _points_scale(found: Sequence[BlueprintWorth]) -> AxisScale | None:
    known = [
        (one.per_thousand, one.per_thousand_error or 0.0) for one in found if one.per_thousand is not None
    ]
    ends = [value + side * error for value, error in known for side in (-1, 1)]
    return AxisScale(*around([0.0, *ends], 3), *_POINTS) if known else None


def _points_axis(points: AxisScale, bottom: float) -> Iterator[Markup]:
    for value, label in tick_texts(ticks(points.low, points.high, 4)).items():
        yield svg.line(points(value), _TOP, points(value), bottom, "axis" if value == 0 else "grid")
        yield svg.text(points(value), bottom + svg.LINE, label, "dim", "middle")


def _draw_row(one: BlueprintWorth, top: float, count: AxisScale, points: AxisScale | None) -> Markup:
    """Draw the funnel of a blueprint: the part left of an edge reached at least that stage."""
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
        svg.text(0, top + 16, name, "strong"),
        svg.text(_FUNNEL[1] + 6, top + 16, fates, "dim", "end"),
        *bars,
        *_draw_points(one, top + 29, points),
        svg.element("title", f"{one.blueprint}: {notation.count(one.germinated)} germinated, {fates}"),
    )


def _draw_points(one: BlueprintWorth, y: float, points: AxisScale | None) -> Iterator[Markup]:
    text = one.metric.gain_with_error(one.per_thousand, one.per_thousand_error)
    yield svg.text(svg.WIDTH, y + 4, text, "" if one.per_thousand is not None else "dim", "end")
    if points is None or one.per_thousand is None:
        return
    if one.per_thousand_error is not None:
        start, end = (points(one.per_thousand + side * one.per_thousand_error) for side in (-1, 1))
        yield svg.line(start, y, end, y, "thin")
    yield svg.path(svg.dots([(points(one.per_thousand), y)]), "dot")
