"""Is PPO healthy, is a head dead, what is chosen, what is paid for: the last iteration of a training.

Where there is room every number has a line and its course over the iterations, elsewhere several share a line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from rich.cells import cell_len
from rich.text import Text

from esper.karn import notation
from esper.karn.following import Following, IterationState
from esper.karn.sections.bands import INSIDE, OUTSIDE, Reading, read
from esper.karn.sections.episode import op_shares
from esper.karn.sections.layout import LABEL, VALUE, Section, flow, labelled
from esper.karn.sections.progress import Measure, course
from esper.leyline.events import UNIT_RANGES, RunRow, UpdateRow

CELL: Final = 18
"""Columns of a number with its name, where several share a line."""
FRACTION: Final = UNIT_RANGES["fraction"]
_NAME: Final = 19
_LIMIT: Final = 8
_MIN_COURSE: Final = 40
"""Columns of a course for which a number gets a line of its own."""


class Metric(NamedTuple):
    """A column of the update row that says whether the policy is healthy."""

    column: str
    name: str
    short: str | None
    """Where room is short; None: left out there."""
    shown: Callable[[float | None], str] = notation.tabular


METRICS: Final = (
    Metric("approx_kl", "KL", "KL"),
    Metric("clip_fraction", "clipped", "clip", notation.share),
    Metric("explained_variance", "explained variance", "ev"),
    Metric("value_nrmse", "value error", "nrmse"),
    Metric("forced_share", "forced", "forced", notation.share),
    Metric("grad_norm", "gradient", "gradient"),
    Metric("ratio_max", "largest ratio", "ratio max"),
    Metric("ratio_min", "smallest ratio", None),
    Metric("broken_episodes", "broken episodes", "broken"),
)


def _of_iteration(column: str) -> Measure:
    def measure(past: IterationState) -> float | None:
        value: float | None = getattr(past.row, column)
        return value

    return measure


class Entry(NamedTuple):
    """A number that a table shows with its course."""

    name: str
    reading: Reading
    measure: Measure
    span: tuple[float, ...] = ()
    """Of the course; its own lowest and highest value unless given."""


def _table(
    label: str, entries: Sequence[Entry], iterations: Sequence[IterationState], width: int
) -> list[Text]:
    """A line for each: name, number, the limit it is beyond, course; nothing where room is short."""
    columns = width - LABEL - _NAME - VALUE - _LIMIT
    if columns < _MIN_COURSE:
        return []
    lines = []
    for index, (name, reading, measure, span) in enumerate(entries):
        value = reading.value
        dim = INSIDE if value.style == INSIDE else ""  # as dim as a healthy number
        gap = " " * max(VALUE - cell_len(value.plain), 0)
        line = labelled("" if index else label, (f"{name:<{_NAME}}", dim), gap, value)
        line.append(f" {reading.limit:<{_LIMIT - 1}}", style=OUTSIDE)
        lines.append(line.append(course(iterations, measure, columns, *span), style=value.style))
    return lines


def policy(state: Following, width: int) -> Section:
    """Is PPO healthy."""
    if not state.iterations:
        return Section.of([labelled("policy", Text("not taught yet", style="dim"))], least=1)
    row = state.iterations[-1].row
    read_metrics = [(m, read(getattr(row, m.column), UpdateRow, m.column, m.shown)) for m in METRICS]
    cells = [reading.named(m.short) for m, reading in read_metrics if m.short is not None]
    entries = [Entry(m.name, reading, _of_iteration(m.column)) for m, reading in read_metrics]
    short = flow("policy", cells, width, cell=CELL, gap=1)
    long = _table("policy", entries, state.iterations, width)
    least = _least(short, [reading for _, reading in read_metrics])
    if row.skipped is None:
        return Section.either(short, long, least)
    left_out = [labelled("policy", Text(f"update left out: {row.skipped}", style=OUTSIDE))]
    return Section.either(left_out + short, left_out + long if long else [], least + 1)


def _least(lines: Sequence[Text], readings: Sequence[Reading]) -> int:
    """All lines where a number is beyond its limit, else the first."""
    return len(lines) if any(reading.limit for reading in readings) else 1


def entropies(state: Following, run: RunRow, width: int) -> Section:
    """Is a head dead: 1 is uniform over what was legal."""
    if not state.iterations:
        return Section.of([])

    def measure_of(head: int) -> Measure:
        return lambda past: past.row.head_entropy[head] if head < len(past.row.head_entropy) else None

    entries = []
    for head, name in enumerate(run.heads):
        measure = measure_of(head)
        shown = partial(notation.points, decimals=2)
        reading = read(measure(state.iterations[-1]), UpdateRow, "head_entropy", shown)
        entries.append(Entry(name, reading, measure, FRACTION))
    cells = [entry.reading.named(entry.name) for entry in entries]
    short = flow("entropy", cells, width, cell=CELL, gap=1)
    long = _table("entropy", entries, state.iterations, width)
    return Section.either(short, long, _least(short, [entry.reading for entry in entries]), joined=True)


def ops(state: Following, run: RunRow, width: int) -> Section:
    """What the policy chooses, and how much of it does not come about."""
    if not state.iterations:
        return Section.of([])

    def measure_of(op: int) -> Measure:
        return lambda past: past.row.op_shares[op]

    last = state.iterations[-1]
    measures = [(name.lower(), measure_of(op)) for op, name in enumerate(run.ops)]
    measures.append(("failed", lambda past: past.refused_share))
    entries = [
        Entry(name, Reading(Text(notation.share(measure(last))), ""), measure, FRACTION)
        for name, measure in measures
    ]
    short = op_shares(run, last.row.op_shares, last.refused_share, width)
    return Section.either(short, _table("ops", entries, state.iterations, width), least=1, joined=True)


def rewards(state: Following, width: int) -> Section:
    """What the reward was paid for."""
    if not state.iterations:
        return Section.of([])

    def measure_of(term: str) -> Measure:
        return lambda past: past.row.reward_terms.get(term)

    paid = state.iterations[-1].row.reward_terms
    entries = [
        Entry(term, Reading(Text(notation.gain(amount, 2)), ""), measure_of(term))
        for term, amount in paid.items()
    ]
    cells = [entry.reading.named(entry.name) for entry in entries]
    short = flow("reward", cells, width, cell=CELL, gap=1)
    return Section.either(short, _table("reward", entries, state.iterations, width), joined=True)
