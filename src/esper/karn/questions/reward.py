"""Which terms make up the reward: their means per iteration or epoch, drawn as stacked columns."""

from __future__ import annotations

from dataclasses import dataclass

from esper.karn import notation
from esper.karn.drawing.chart import Chart, Line, Panel, Part, draw
from esper.karn.drawing.picture import Picture
from esper.karn.drawing.style import part_look
from esper.karn.questions.episodes import EpisodeKey, is_training
from esper.karn.questions.places import AxisName, Place, axis_of
from esper.karn.run import Run


@dataclass(frozen=True, slots=True)
class RewardPoint:
    """The reward at one place; None is unknown."""

    place: Place
    terms: tuple[float | None, ...]
    """Means, in the order of the names."""
    total: float | None


@dataclass(frozen=True, slots=True)
class Reward:
    """The terms over the iterations of a training, or over the epochs of an episode."""

    axis: AxisName
    end: int
    terms: tuple[str, ...]
    points: tuple[RewardPoint, ...]


def reward(run: Run, episode: EpisodeKey | None = None) -> Reward | None:
    """Per iteration or, of one episode, per epoch; None: there were no rewards."""
    axis = axis_of(run, episode)
    if not is_training(run):
        return None
    if axis.name == "iteration":
        table, place, total, condition = "update", "iteration", "mean_return", "true"
    else:
        table, place, total, condition = "decision", "epoch + 1", "reward", axis.condition
    terms = [
        name
        for (name,) in run.sql(
            f"SELECT DISTINCT unnest(map_keys(reward_terms)) AS term FROM {table} WHERE {condition}"
            " ORDER BY term",
            axis.parameters,
        ).fetchall()
    ]
    means = ", ".join(["avg(reward_terms[?])"] * len(terms) + [f"avg({total})"])
    found = run.sql(
        f"""
        SELECT min({place}), max({place}), {means} FROM {table}
        WHERE {condition} AND reward_terms IS NOT NULL GROUP BY {axis.group(place)} ORDER BY 1
        """,
        [*terms, *axis.parameters],
    ).fetchall()
    if not found:
        return None
    points = tuple(RewardPoint(Place(first, last), tuple(means), sum_) for first, last, *means, sum_ in found)
    return Reward(axis.name, max(axis.end, points[-1].place.last), tuple(terms), points)


def draw_reward(found: Reward, beside: Reward | None = None) -> Picture:
    """One column per iteration or epoch, and the sum as a line."""
    unit = "episode" if found.axis == "iteration" else "epoch"
    return Picture(
        svg=draw(_chart(found), None if beside is None else _chart(beside)),
        columns=[found.axis, *found.terms, _total_name(found)],
        rows=[[str(point.place), *map(_text, (*point.terms, point.total))] for point in found.points],
        caption=f"Mean reward terms per {unit}; line: their sum.",
    )


def _total_name(found: Reward) -> str:
    return "return" if found.axis == "iteration" else "reward"


def _text(value: float | None) -> str:
    return notation.gain(value, 3)


def _chart(found: Reward) -> Chart:
    parts = [
        Part(name, [point.terms[index] for point in found.points], _text, part_look(index))
        for index, name in enumerate(found.terms)
    ]
    total = Line(_total_name(found), [point.total for point in found.points], _text, "thin")
    return Chart(
        title="Reward terms",
        description=", ".join(f"{part.name} {_text(part.values[-1])}" for part in parts),
        axis=found.axis,
        end=found.end,
        places=[point.place for point in found.points],
        panels=[Panel(180, [total], parts=parts, zero=True)],
        room=190,
    )
