"""Are seeds worth their cost: how far the seeds of each blueprint came, and what they contributed."""

from __future__ import annotations

from dataclasses import dataclass

from esper.karn.questions.episodes import EpisodeKey
from esper.karn.questions.places import axis_of
from esper.karn.run import Run
from esper.leyline.stages import Stage


@dataclass(frozen=True, slots=True)
class BlueprintWorth:
    """All seeds of one blueprint; None is unknown."""

    blueprint: str
    germinated: int
    blended: int
    held: int
    fossilized: int
    """How many seeds came that far; each of these holds the next."""
    pruned: int
    measured: int
    """Seeds whose contribution was measured; each counts with its last measurement."""
    contribution: float | None
    """Their mean, in points."""
    contribution_error: float | None
    """Standard error over seeds; of a single seed, that of its measurement."""
    params: float | None
    """Mean parameters of the seeds whose parameters were recorded."""
    per_thousand: float | None
    """Points per 1,000 parameters, over the measured seeds whose parameters were recorded."""
    per_thousand_error: float | None


def worth(run: Run, episode: EpisodeKey | None = None) -> tuple[BlueprintWorth, ...] | None:
    """By blueprint, the most germinated first; None: no seed germinated."""
    axis = axis_of(run, episode)
    found = run.sql(
        f"""
        WITH moves AS (SELECT * FROM transition WHERE seed >= 0 AND {axis.condition}),
        reached AS (
            SELECT env, episode, seed, any_value(blueprint) AS blueprint,
                   bool_or(to_stage = {Stage.BLENDING:d}) AS blended,
                   bool_or(to_stage = {Stage.HOLDING:d}) AS held,
                   bool_or(to_stage = {Stage.FOSSILIZED:d}) AS fossilized,
                   bool_or(to_stage = {Stage.PRUNED:d}) AS pruned,
                   arg_max(contribution, epoch) FILTER (contribution IS NOT NULL) AS contribution
            FROM moves GROUP BY env, episode, seed),
        measured AS (
            SELECT env, episode, seed, any_value(params) AS params,
                   arg_max((contribution, contribution_error), epoch)
                       FILTER (contribution IS NOT NULL) AS last
            FROM seed WHERE {axis.condition} GROUP BY env, episode, seed),
        known AS (
            SELECT reached.* EXCLUDE (contribution), measured.params,
                   CASE WHEN last IS NULL THEN reached.contribution ELSE last[1] END AS points,
                   last[2] AS error,
                   CASE WHEN points IS NOT NULL THEN measured.params END AS counted
            FROM reached LEFT JOIN measured USING (env, episode, seed))
        SELECT blueprint, count(*), count(*) FILTER (blended), count(*) FILTER (held),
               count(*) FILTER (fossilized), count(*) FILTER (pruned), count(points), avg(points),
               CASE WHEN count(points) > 1 THEN stddev_samp(points) / sqrt(count(points))
                    ELSE any_value(error) END,
               avg(params),
               1000 * sum(points) FILTER (counted > 0) / sum(counted) FILTER (counted > 0),
               CASE WHEN count(points) FILTER (counted > 0) > 1
                    THEN 1000 * stddev_samp(points) FILTER (counted > 0)
                         * sqrt(count(points) FILTER (counted > 0)) / sum(counted) FILTER (counted > 0)
                    ELSE 1000 * any_value(error) / sum(counted) FILTER (counted > 0) END
        FROM known GROUP BY blueprint ORDER BY count(*) DESC, blueprint
        """,
        [*axis.parameters, *axis.parameters],
    ).fetchall()
    names = run.row.blueprints
    return tuple(BlueprintWorth(names[blueprint], *values) for blueprint, *values in found) or None
