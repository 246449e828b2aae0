"""Does growth pay: scores of all episodes beside those of their do-nothing twins, and the parameters.

The picture: a fan of scores with the twin as a dotted line, parameters as a step line below.
"""

from esper.karn import notation
from esper.karn.drawing.chart import Chart, Line, Panel, draw
from esper.karn.drawing.picture import Picture, course_table
from esper.karn.questions.episodes import IN_A_COMPLETE_ITERATION, LASTED, is_training
from esper.karn.questions.places import Courses, courses
from esper.karn.run import Run
from esper.karn.statistics import SQL_MEAN


def growth(run: Run, *, joined: bool = True) -> Courses | None:
    """The spread of the scores, and the means of score, twin and parameters; None: no score is known.

    Of a training, means are those of the episodes that lasted. ``joined``: as places of a long line, else
    every epoch or iteration by itself.
    """
    table, twin, where, averaged = "epoch", "twin_score", "true", "true"
    if is_training(run):
        table, twin, where, averaged = "episode", "twin_val_score", IN_A_COMPLETE_ITERATION, LASTED
    means = {"score": "val_score", "twin": twin, "parameters": "params"}
    columns = {
        "episodes": "count(DISTINCT (env, episode, attempt))",
        "lowest": "min(val_score)",
        "25 %": "quantile_cont(val_score, 0.25)",
        "median": "median(val_score)",
        "75 %": "quantile_cont(val_score, 0.75)",
        "highest": "max(val_score)",
        **{name: f"{SQL_MEAN}({column}) FILTER (WHERE {averaged})" for name, column in means.items()},
    }
    return courses(run, table, columns, where=where, joined=joined)


def draw_growth(found: Courses, beside: Courses | None = None) -> Picture:
    table = course_table(found, notation.points, {"episodes": notation.count, "parameters": notation.count})
    return Picture(draw(_chart, found, beside), *table, _caption(found))


def _chart(found: Courses) -> Chart:
    size = f"{notation.count(found.last('parameters'))} params"
    params = Line("parameters", found["parameters"], notation.count, "steps", label=size)
    bands = [(found["lowest"], found["highest"]), (found["25 %"], found["75 %"])]
    scores = [
        Line("twin", found["twin"], notation.points, "twin"),
        Line("score", found["score"], notation.points),
    ]
    return Chart(
        title="Score and parameters",
        description=f"Score {notation.points(found.last('score'))} and twin"
        f" {notation.points(found.last('twin'))} at {found.axis} {found.places[-1]}, with"
        f" {notation.count(found.last('parameters'))} parameters.",
        found=found,
        panels=[
            Panel(170, scores, bands if _has_fan(found) else (), near=0.0, most=100.0),
            Panel(60, [params], zero=True, ticks=2),
        ],
        room=124,
    )


def _has_fan(found: Courses) -> bool:
    return found["lowest"] != found["highest"]


def _caption(found: Courses) -> str:
    score, twin, params = (found.last(name) for name in ("score", "twin", "parameters"))
    fan = ""
    if _has_fan(found):
        which = " of those that lasted" if found.axis == "iteration" else ""
        fan = f"Bands: all episodes, and their middle half; line: the mean{which}. "
    return (
        f"{fan}Dotted: the do-nothing twin. At {found.axis} {found.places[-1]} the score is"
        f" {notation.points(score)}, {notation.gain(notation.difference(score, twin))} points over the twin,"
        f" with {notation.count(params)} parameters."
    )
