"""Is the controller improving: scores, returns, sizes and evaluations over the rounds of a training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from rich.text import Text

from esper.karn import notation
from esper.karn.following import Following, RoundState
from esper.karn.sections.chart import Bar, charted
from esper.karn.sections.layout import COURSE_AT, LABEL, VALUE, Section, labelled
from esper.leyline.events import RunRow

FACTS: Final = 29
"""Columns of what is said of a number."""
MAX_COURSE: Final = 60
MAX_CHART: Final = 76

Measure = Callable[[RoundState], float | None]


def course(rounds: Sequence[RoundState], measure: Measure, columns: int, *span: float) -> str:
    """A number over all rounds that are finished."""
    columns = max(min(columns, MAX_COURSE), 1)
    return notation.trend([measure(past) for past in rounds], columns, *span)


def progress(state: Following, run: RunRow, width: int) -> Section:
    """Does growth pay, and is the controller improving."""
    rounds = state.rounds
    lines = [
        _score_line(rounds, width),
        _return_line(rounds, width),
        _twin_line(rounds, width),
        _params_line(rounds, run, width),
        _evaluation_line(rounds, width),
    ]

    def draw(room: int) -> list[Text]:
        kept = lines[:room]
        return [kept[index] for index in (0, 2, 1, 3, 4) if index < len(kept)]

    return Section(draw, least=4, wish=len(lines), most=len(lines))


def _fact_line(label: str, value: str, facts: str, line: str | Text) -> Text:
    """Label, number, what is to be said of it, course."""
    return labelled(label, f"{value:>{VALUE}}  {facts:<{FACTS}}", line)


def _beside_facts(rounds: Sequence[RoundState], measure: Measure, width: int, *span: float) -> str:
    return course(rounds, measure, width - LABEL - VALUE - 2 - FACTS - 1, *span)


def _score(past: RoundState) -> float | None:
    return past.row.val_score


def _twin(past: RoundState) -> float | None:
    return past.twin_score


def _latest(rounds: Sequence[RoundState], measure: Measure) -> float | None:
    return measure(rounds[-1]) if rounds else None


def _span(rounds: Sequence[RoundState]) -> tuple[float, float]:
    """One scale for scores and twins."""
    return notation.shared_scale([_score(past) for past in rounds] + [_twin(past) for past in rounds])


def _score_line(rounds: Sequence[RoundState], width: int) -> Text:
    known = [past.row for past in rounds if past.row.val_score is not None]
    best = max(known, key=lambda row: row.val_score or 0.0, default=None)
    facts = f"best {notation.points(best.val_score)} in round {best.round}" if best else ""
    line = _beside_facts(rounds, _score, width, *_span(rounds))
    return _fact_line("score", notation.points(_latest(rounds, _score)), facts, line)


def _twin_line(rounds: Sequence[RoundState], width: int) -> Text:
    twin = _latest(rounds, _twin)
    lead = notation.gain(notation.difference(_latest(rounds, _score), twin))
    line = Text(_beside_facts(rounds, _twin, width, *_span(rounds)), style="dim")
    return _fact_line("twin", notation.points(twin), f"lead {lead}", line)


def _return_line(rounds: Sequence[RoundState], width: int) -> Text:
    low, high = rounds[-1].returns if rounds else (None, None)
    facts = f"quartiles {notation.gain(low, 2)} to {notation.gain(high, 2)}"
    line = _beside_facts(rounds, lambda past: past.row.mean_return, width)
    latest = _latest(rounds, lambda past: past.row.mean_return)
    return _fact_line("return", notation.gain(latest, 2), facts, line)


def _params_line(rounds: Sequence[RoundState], run: RunRow, width: int) -> Text:
    params = _latest(rounds, lambda past: past.row.params)
    facts = f"{notation.factor(params, run.host_params)} the host's {notation.count(run.host_params)}"
    line = _beside_facts(rounds, lambda past: past.row.params, width)
    return _fact_line("params", notation.count(params), facts, line)


def _evaluation_line(rounds: Sequence[RoundState], width: int) -> Text:
    """The lives without exploration, in the rounds in which there were any."""
    rows = [past.row for past in rounds if past.row.evaluation_return is not None]
    if not rows:
        return _fact_line("argmax", notation.UNKNOWN, "not evaluated yet", "")
    best = max(rows, key=lambda row: row.evaluation_return or 0.0)
    facts = f"best {notation.points(best.evaluation_score)} in round {best.round}"
    line = _beside_facts(rounds, lambda past: past.row.evaluation_score, width)
    return _fact_line("argmax", notation.points(rows[-1].evaluation_score), facts, line)


def fan(state: Following, width: int) -> Section:
    """Scores over the rounds: to the lower quartile of the lives, shaded to the upper one, and the twins."""
    rounds = state.rounds
    if not rounds:
        return Section.of([])
    columns = max(min(width - COURSE_AT, MAX_CHART), 1)
    lows, highs = ([past.scores[side] for past in rounds] for side in (0, 1))
    twins = [past.twin_score for past in rounds]
    condensed = (notation.condense(values, columns) for values in (lows, highs, twins))
    bars = [Bar(*values) for values in zip(*condensed, strict=True)]
    return charted(bars, f"score of the lives, quartiles, and twin over rounds 1–{rounds[-1].row.round}")
