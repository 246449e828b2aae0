"""Charts of the contributions of seeds: by blueprint, and as interactions between pairs of slots.

The chart by blueprint shows how many seeds reached each stage and what they contribute. The interactions are
a matrix of slots, with the contribution of each slot on the diagonal.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from typing import Final, NamedTuple

from markupsafe import Markup

from esper.karn import notation
from esper.karn.drawing import svg
from esper.karn.drawing.axes import AxisScale, around, tick_texts, ticks
from esper.karn.drawing.picture import Picture, shade_look
from esper.karn.metric import Metric, metric_of
from esper.karn.questions.episode_selection import THIS_EPISODE, default_episode, episode_name
from esper.karn.run import Run
from esper.leyline.stages import Stage

_ROW: Final = 46.0
_TOP: Final = 26.0
_FUNNEL: Final = (0.0, 326.0)
_POINTS: Final = (352.0, 492.0)
_MATRIX_LEFT: Final = 100.0
_CELL_WIDTH: Final = 110.0
_CELL: Final = 38.0
_MATRIX_TOP: Final = 24.0
_PALEST: Final = 0.4
"""Shade of the darkest cell of the interaction matrix, from 0 (lightest) to 1; light enough for text on the
cell.
"""


class BlueprintWorth(NamedTuple):
    """Statistics over all seeds of one blueprint; a value of None is unknown."""

    blueprint: str
    metric: Metric
    germinated: int
    blended: int
    held: int
    fossilized: int
    """``germinated``, ``blended``, ``held`` and ``fossilized`` are the numbers of seeds that reached at least
    the named stage.
    """
    pruned: int
    measured: int
    """Number of seeds with a measured contribution; the last measurement of each seed is used."""
    contribution: float | None
    """Mean contribution of the seeds, in units of the run's metric."""
    contribution_error: float | None
    """Standard error of the mean contribution; for a single seed, the standard error of its measurement."""
    params: float | None
    """Mean parameters of the seeds whose parameters were recorded."""
    per_thousand: float | None
    """Sum of contributions per 1,000 parameters, over seeds whose contribution and parameters are known."""
    per_thousand_error: float | None


def worth(run: Run) -> tuple[BlueprintWorth, ...] | None:
    """Return statistics of the seeds per blueprint, the blueprint with most seeds first; None if no seed
    germinated.
    """
    stages = Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED, Stage.PRUNED
    reached = ", ".join(f"count(*) FILTER (list_contains(stages, {stage:d}))" for stage in stages)
    found = run.fetch(
        f"""
        WITH reached AS (
            SELECT env, episode, attempt, seed, any_value(blueprint) AS blueprint, list(to_stage) AS stages,
                   arg_max(contribution, epoch) FILTER (contribution IS NOT NULL) AS contribution
            FROM transition WHERE seed >= 0 GROUP BY env, episode, attempt, seed),
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
        SELECT blueprint, count(*), {reached}, count(points), avg(points),
               CASE WHEN count(points) > 1 THEN stddev_samp(points) / sqrt(count(points))
                    ELSE any_value(error) END,
               avg(params),
               1000 * sum(sized) / sum(size),
               CASE WHEN count(sized) > 1 THEN 1000 * stddev_samp(sized) * sqrt(count(sized)) / sum(size)
                    ELSE 1000 * any_value(error) / sum(size) END
        FROM known GROUP BY blueprint ORDER BY count(*) DESC, blueprint
        """
    )
    names, metric = run.row.blueprints, metric_of(run.row)
    return tuple(BlueprintWorth(names[blueprint], metric, *values) for blueprint, *values in found) or None


def draw_worth(found: Sequence[BlueprintWorth], compared: Sequence[BlueprintWorth] | None = None) -> Picture:
    """Draw the seeds by stage reached and the contribution of each blueprint, on scales that include a second
    run if given.
    """
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
    """Draw the row of a blueprint: a bar with the number of seeds whose last stage was FOSSILIZED, HOLDING,
    BLENDING or TRAINING, and the contribution per 1,000 parameters.
    """
    stages = Stage.FOSSILIZED, Stage.HOLDING, Stage.BLENDING, Stage.TRAINING
    ends = pairwise([0, one.fossilized, one.held, one.blended, one.germinated])
    bars = [
        svg.rectangle(count(start), top + 23, count(end) - count(start), 12, stage.name.lower())
        for stage, (start, end) in zip(stages, ends, strict=True)
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


# --- interactions -----------------------------------------------------------------------------------


class Interactions(NamedTuple):
    """Interactions of slots in one episode, at the last epoch with counterfactual scores (scores with some
    seeds off).
    """

    name: str
    """Display name of the episode, such as "episode 0"."""
    epoch: int
    slots: tuple[str, ...]
    """Slots whose seeds are on in some measured configurations and off in others."""
    score: float
    """Score of the network with the seeds of all slots on."""
    metric: Metric
    matrix: tuple[tuple[float | None, ...], ...]
    """Matrix with contributions of slots on the diagonal and interactions of two slots elsewhere; a value of
    None is unknown.
    """


def interactions(run: Run) -> Interactions | None:
    """Return the interactions of slots in the best episode of a policy training, or in the last episode of
    any other run; None if no on/off configuration of seeds was scored.
    """
    episode, metric = default_episode(run), metric_of(run.row)
    if episode is None:
        return None
    found = run.fetch(
        f"""
        SELECT epoch, "on", {metric.name} FROM counterfactual WHERE {THIS_EPISODE}
        AND {metric.name} IS NOT NULL
        AND epoch = (SELECT max(epoch) FROM counterfactual WHERE {THIS_EPISODE})
        """,
        [*episode, *episode],
    )
    if not found:
        return None
    switched = [slot for slot in range(len(run.row.slots)) if len({on[slot] for _, on, _ in found}) > 1]
    scores = {tuple(on[slot] for slot in switched): score for _, on, score in found}
    everything = (True,) * len(switched)
    # A killed run may have written the scores of only some on/off configurations of an epoch.
    if not switched or everything not in scores:
        return None
    places = range(len(switched))
    effects = [[_effect(scores, {first, second}) for second in places] for first in places]
    return Interactions(
        name=episode_name(run, episode),
        epoch=found[0][0],
        slots=tuple(run.row.slots[slot] for slot in switched),
        score=scores[everything],
        metric=metric,
        matrix=tuple(tuple(map(metric.gained, row)) for row in effects),
    )


def _effect(scores: Mapping[tuple[bool, ...], float], slots: set[int]) -> float | None:
    """Return the contribution of one slot, or the interaction of two slots. With v the score of the network
    without the seeds in the given slots, the contribution of slot i is v() − v(i), and the interaction of
    slots i and j is v() − v(i) − v(j) + v(i, j).
    """
    all_slots = range(len(next(iter(scores))))
    removals = [off for count in range(len(slots) + 1) for off in combinations(slots, count)]
    found = [(len(off), scores.get(tuple(slot not in off for slot in all_slots))) for off in removals]
    known = [(-1) ** count * score for count, score in found if score is not None]
    return sum(known) if len(known) == len(found) else None


def draw_interactions(found: Interactions, compared: Interactions | None = None) -> Picture:
    """Draw the interaction matrix of the slots; ``compared`` is unused, because two matrices share no
    axis.
    """
    size, metric = len(found.slots), found.metric
    unit = metric.unit or f" {metric.name}"
    width = min(_CELL_WIDTH, (svg.WIDTH - _MATRIX_LEFT) / size)
    letters = int(width / svg.LETTER)
    strongest = max((abs(value) for row in found.matrix for value in row if value is not None), default=0.0)
    drawn = [
        svg.text(_MATRIX_LEFT + (index + 0.5) * width, 15, svg.shorten(slot, letters), "dim", "middle")
        + svg.text(_MATRIX_LEFT - 8, _MATRIX_TOP + (index + 0.5) * _CELL + 5, svg.shorten(slot, 9), "", "end")
        for index, slot in enumerate(found.slots)
    ]
    for first, row in enumerate(found.matrix):
        for second, value in enumerate(row):
            left, top = _MATRIX_LEFT + second * width, _MATRIX_TOP + first * _CELL
            look = "strong" if first == second else ""
            shade = shade_look(_PALEST * abs(value or 0.0) / (strongest or 1.0))
            cell = svg.rectangle(left, top, width, _CELL, f"cell {shade}")
            text = svg.text(left + width / 2, top + _CELL / 2 + 5, metric.gain(value), look, "middle")
            drawn.append(svg.group(cell, text))
    return Picture(
        svg=svg.drawing(
            _MATRIX_TOP + size * _CELL + 4,
            "Pair interactions",
            f"{metric.name.capitalize()} {metric.text(found.score)} with all of {', '.join(found.slots)} on.",
            *drawn,
        ),
        columns=["slot", *found.slots],
        rows=[[slot, *map(metric.gain, row)] for slot, row in zip(found.slots, found.matrix, strict=True)],
        caption=(
            f"{found.name.capitalize()}, epoch {found.epoch}, {metric.text(found.score)}{unit} with all"
            f" seeds on. Bold: {metric.lost} without the slot. Elsewhere: what two slots add beyond their"
            " own; negative: they do the same work."
        ),
    )
