"""Tables of a study as text cells, for Markdown and HTML."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from esper.karn import notation
from esper.karn.resampling import (
    FloatArray,
    Interval,
    excess,
    holm,
    mean_interval,
    merit_interval,
    merit_ratio,
    p_value,
    paired,
    regret,
)

_TRAINING: Final = ("forward", "backward")
_INSTRUMENT: Final = "validation"


class ArmNumbers(NamedTuple):
    """Numbers of one arm; a run that diverged is NaN."""

    name: str
    is_static: bool
    losses: FloatArray
    """Test losses ``[training, rng seed, mark]``."""
    scores: FloatArray
    """Final test scores ``[training, rng seed]``."""
    params: FloatArray
    """Mean number of parameters ``[mark]``."""
    flops: Mapping[str, float]
    """Mean final FLOPs by purpose; ``charged`` is the part that counts against the budget."""
    note: str
    """Learning rate and other settings chosen for the arm."""


class StudyNumbers(NamedTuple):
    """Numbers of all arms of one task."""

    task: str
    budget: int
    marks: Sequence[float]
    rng_seeds: range
    arms: Sequence[ArmNumbers]
    control: str
    reference: Sequence[str]
    """Best static arm on the selection rng seeds, by mark; empty without static arms."""

    def arm(self, name: str) -> ArmNumbers:
        """Return an arm by name."""
        return next(arm for arm in self.arms if arm.name == name)

    @property
    def compute(self) -> list[str]:
        """Charged compute at each mark, as text."""
        return [notation.flop(mark * self.budget) for mark in self.marks]

    def excesses(self) -> dict[str, FloatArray]:
        """Return the excess loss of every arm over the reference, ``[training, rng seed, mark]``."""
        reference = np.stack(
            [self.arm(name).losses[0, :, mark] for mark, name in enumerate(self.reference)], axis=-1
        )
        return {arm.name: excess(arm.losses, reference) for arm in self.arms}


class StudyTable(NamedTuple):
    """A table with a title, and a caption that explains how to read it."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    caption: str
    foot: Sequence[str] = ()
    """A last row of names below numeric columns."""

    def markdown(self) -> str:
        """Return the table as Markdown."""
        rows = [[cell.replace("|", "\\|") for cell in row] for row in (*self.rows, self.foot) if row]
        lines = [self.columns, ["---"] * len(self.columns), *rows]
        return "\n".join(
            [f"## {self.title}", "", *(f"| {' | '.join(line)} |" for line in lines), "", self.caption]
        )


def study_tables(found: StudyNumbers) -> list[StudyTable]:
    """Return all tables of a task; those about regret need static arms."""
    tables = [_losses(found)]
    if found.reference:
        tables += [_regrets(found), _ratios(found)]
    return [table for table in (*tables, _at_the_end(found), _spending(found)) if table.rows]


def _losses(found: StudyNumbers) -> StudyTable:
    rows = [
        [arm.name, *map(partial(number, "{:.3f}"), arm.losses.mean(axis=(0, 1))), arm.note]
        for arm in found.arms
    ]
    return StudyTable(
        f"{found.task}: test loss by compute",
        ["arm", *found.compute, "chosen"],
        rows,
        f"Means over {len(found.rng_seeds)} rng seeds from {found.rng_seeds.start} on, all arms alike.",
    )


def _regrets(found: StudyNumbers) -> StudyTable:
    above = found.excesses()
    rows = [
        [name, *map(_percent, regret(values)), _text(_percent, merit_interval(values))]
        for name, values in above.items()
    ]
    return StudyTable(
        f"{found.task}: regret by compute",
        ["arm", *found.compute, "largest (95 %)"],
        rows,
        "Regret: mean over rng seeds of the loss above that of the static size that was best there, on the"
        " selection rng seeds or, without any, in hindsight; relative to it. The largest is"
        " recomputed in every bootstrap draw.",
        ["best static size", *found.reference, ""],
    )


def _ratios(found: StudyNumbers) -> StudyTable:
    above = found.excesses()
    static = [arm.name for arm in found.arms if arm.is_static]
    rows = [
        [name, *(_text(partial(number, "{:.2f}"), merit_ratio(values, above[other])) for other in static)]
        for name, values in above.items()
        if name not in static
    ]
    return StudyTable(
        f"{found.task}: largest regret as a multiple of each static size's",
        ["arm", *static],
        rows,
        "With 95 % intervals, both maxima recomputed in every bootstrap draw.",
    )


def _at_the_end(found: StudyNumbers) -> StudyTable:
    control = found.arm(found.control).scores
    differences = {arm.name: paired(arm.scores, control) for arm in found.arms if arm.name != found.control}
    adjusted = holm({name: p_value(values) for name, values in differences.items()})
    rows = []
    for arm in found.arms:
        above, p = "", ""
        if arm.name in differences:
            above = _text(partial(number, "{:+.2f}"), mean_interval(differences[arm.name]))
            p = number("{:.3g}", adjusted[arm.name])
        score = _text(partial(number, "{:.2f}"), mean_interval(arm.scores))
        rows.append([arm.name, score, above, p, number("{:,.0f}", float(arm.params[-1]))])
    return StudyTable(
        f"{found.task}: test score after {found.compute[-1]}",
        ["arm", "score (95 %)", f"above {found.control} (95 %)", "p (Holm)", "parameters"],
        rows,
        "Differences are paired by rng seed. Intervals are percentiles of a bootstrap over rng seeds, and"
        " over trainings where an arm has several; of few they are too narrow. p is Student's, with Holm's"
        " correction over arms.",
    )


def _spending(found: StudyNumbers) -> StudyTable:
    purposes = [name for name in found.arms[0].flops if name not in (*_TRAINING, _INSTRUMENT, "charged")]
    shown = {"charged": "charged", **{name: f"of it {name.replace('_', ' ')}" for name in purposes}}
    shown[_INSTRUMENT] = "validation, not charged"
    return StudyTable(
        f"{found.task}: compute",
        ["arm", *shown.values()],
        [[arm.name, *(_flop(arm.flops[name]) for name in shown)] for arm in found.arms],
        "Means of whole runs. What is charged beyond training is what growth costs; one validation a step is"
        " an instrument that every arm has.",
    )


def number(form: str, value: float) -> str:
    """Format a value; "∞" if infinite, "–" if NaN."""
    if math.isinf(value):
        return "∞"
    return notation.UNKNOWN if math.isnan(value) else form.format(value)


def _percent(value: float) -> str:
    return number("{:.1f} %", 100.0 * value)


def _flop(value: float) -> str:
    return notation.UNKNOWN if math.isnan(value) else notation.flop(value)


def _text(text: Callable[[float], str], found: Interval) -> str:
    if math.isnan(found.low):
        return text(found.value)
    return f"{text(found.value)} ({text(found.low)} to {text(found.high)})"
