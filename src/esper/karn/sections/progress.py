"""Is the controller improving: scores, returns, sizes and evaluations over the iterations of a training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from rich.text import Text

from esper.karn import notation
from esper.karn.following import Following, IterationState
from esper.karn.sections.chart import Bar, charted
from esper.karn.sections.layout import COURSE_AT, LABEL, VALUE, Section, labelled
from esper.leyline.events import RunRow

FACTS: Final = 29
"""Columns of what is said of a number."""
MAX_COURSE: Final = 60
MAX_CHART: Final = 76

Measure = Callable[[IterationState], float | None]


def course(iterations: Sequence[IterationState], measure: Measure, columns: int, *span: float) -> str:
    """A number over all iterations that are finished."""
    columns = max(min(columns, MAX_COURSE), 1)
    return notation.trend([measure(past) for past in iterations], columns, *span)


def progress(state: Following, run: RunRow, width: int) -> Section:
    """Does growth pay, and is the controller improving."""
    iterations = state.iterations
    lines = [
        _score_line(iterations, width),
        _return_line(iterations, width),
        _twin_line(iterations, width),
        _params_line(iterations, run, width),
        _evaluation_line(iterations, width),
    ]

    def draw(room: int) -> list[Text]:
        kept = lines[:room]
        return [kept[index] for index in (0, 2, 1, 3, 4) if index < len(kept)]

    return Section(draw, least=4, wish=len(lines), most=len(lines))


def _fact_line(label: str, value: str, facts: str, line: str | Text) -> Text:
    """Label, number, what is to be said of it, course."""
    return labelled(label, f"{value:>{VALUE}}  {facts:<{FACTS}}", line)


def _beside_facts(iterations: Sequence[IterationState], measure: Measure, width: int, *span: float) -> str:
    return course(iterations, measure, width - LABEL - VALUE - 2 - FACTS - 1, *span)


def _score(past: IterationState) -> float | None:
    return past.row.val_score


def _twin(past: IterationState) -> float | None:
    return past.twin_score


def _latest(iterations: Sequence[IterationState], measure: Measure) -> float | None:
    return measure(iterations[-1]) if iterations else None


def _span(iterations: Sequence[IterationState]) -> tuple[float, float]:
    """One scale for scores and twins."""
    return notation.shared_scale([_score(past) for past in iterations] + [_twin(past) for past in iterations])


def _score_line(iterations: Sequence[IterationState], width: int) -> Text:
    known = [past.row for past in iterations if past.row.val_score is not None]
    best = max(known, key=lambda row: row.val_score or 0.0, default=None)
    facts = f"best {notation.points(best.val_score)} in iteration {best.iteration}" if best else ""
    line = _beside_facts(iterations, _score, width, *_span(iterations))
    return _fact_line("score", notation.points(_latest(iterations, _score)), facts, line)


def _twin_line(iterations: Sequence[IterationState], width: int) -> Text:
    twin = _latest(iterations, _twin)
    lead = notation.gain(notation.difference(_latest(iterations, _score), twin))
    line = Text(_beside_facts(iterations, _twin, width, *_span(iterations)), style="dim")
    return _fact_line("twin", notation.points(twin), f"lead {lead}", line)


def _return_line(iterations: Sequence[IterationState], width: int) -> Text:
    low, high = iterations[-1].returns if iterations else (None, None)
    facts = f"quartiles {notation.gain(low, 2)} to {notation.gain(high, 2)}"
    line = _beside_facts(iterations, lambda past: past.row.mean_return, width)
    latest = _latest(iterations, lambda past: past.row.mean_return)
    return _fact_line("return", notation.gain(latest, 2), facts, line)


def _params_line(iterations: Sequence[IterationState], run: RunRow, width: int) -> Text:
    params = _latest(iterations, lambda past: past.row.params)
    facts = f"{notation.factor(params, run.host_params)} the host's {notation.count(run.host_params)}"
    line = _beside_facts(iterations, lambda past: past.row.params, width)
    return _fact_line("params", notation.count(params), facts, line)


def _evaluation_line(iterations: Sequence[IterationState], width: int) -> Text:
    """The episodes without exploration, in the iterations in which there were any."""
    rows = [past.row for past in iterations if past.row.evaluation_return is not None]
    if not rows:
        return _fact_line("argmax", notation.UNKNOWN, "not evaluated yet", "")
    best = max(rows, key=lambda row: row.evaluation_return or 0.0)
    facts = f"best {notation.points(best.evaluation_score)} in iteration {best.iteration}"
    line = _beside_facts(iterations, lambda past: past.row.evaluation_score, width)
    return _fact_line("argmax", notation.points(rows[-1].evaluation_score), facts, line)


def fan(state: Following, width: int) -> Section:
    """Scores over the iterations: to the lower quartile of the episodes, shaded to the upper one, and the twins."""
    iterations = state.iterations
    if not iterations:
        return Section.of([])
    columns = max(min(width - COURSE_AT, MAX_CHART), 1)
    lows, highs = ([past.scores[side] for past in iterations] for side in (0, 1))
    twins = [past.twin_score for past in iterations]
    condensed = (notation.condense(values, columns) for values in (lows, highs, twins))
    bars = [Bar(*values) for values in zip(*condensed, strict=True)]
    return charted(
        bars, f"score of the episodes, quartiles, and twin over iterations 1–{iterations[-1].row.iteration}"
    )
