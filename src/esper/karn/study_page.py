"""Tables and charts of a study, as Markdown and as one HTML file."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.karn import notation, resampling
from esper.karn.drawing.curves import Curve, draw_curves
from esper.karn.drawing.picture import Picture
from esper.karn.page.rendering import render
from esper.karn.resampling import FloatArray, Interval

_TRAINING: Final = ("forward", "backward")
_INSTRUMENT: Final = "validation"
BEST_PLAN: Final = "best plan in hindsight"


class ArmNumbers(NamedTuple):
    """Results of one study arm; the numbers of a run that diverged are NaN."""

    name: str
    is_static: bool
    losses: FloatArray
    """Test losses of the arm, ``[training, rng seed, mark]``."""
    scores: FloatArray
    """Test scores of the arm at the end of the budget, ``[training, rng seed]``."""
    params: FloatArray
    """Mean number of parameters of the arm's networks at each compute mark, ``[mark]``."""
    flops: Mapping[str, float]
    """Mean FLOPs of a run by purpose of the compute, such as ``backward``; ``charged`` is the part that
    counts against the budget.
    """
    seconds: FloatArray
    """Mean CPU seconds of a run up to each compute mark, ``[mark]``."""
    grown: NDArray[np.bool_]
    """Whether the networks of all runs had grown before each compute mark, ``[mark]``."""
    is_plan: bool
    """Whether the arm grows by a fixed plan."""
    note: str
    """Text on the arm: its chosen learning-rate factors and plan, and the number of failed runs."""


class StudyNumbers(NamedTuple):
    """Results of all study arms on one task."""

    task: str
    budget: int
    marks: Sequence[float]
    rng_seeds: range
    arms: Sequence[ArmNumbers]
    control: str
    reference: Mapping[str, FloatArray]
    """Test losses of every static size (host that never grows) with every learning rate, ``[rng seed,
    mark]``; empty without static arms.
    """

    def arm(self, name: str) -> ArmNumbers:
        """Return the results of the arm with the given name."""
        return next(arm for arm in self.arms if arm.name == name)

    @property
    def compute(self) -> list[str]:
        """Compute that is spent up to each mark (share of the budget), as text."""
        return [notation.flop(mark * self.budget) for mark in self.marks]

    def regrets(self) -> dict[str, FloatArray]:
        """Return the regret of every arm against the best static size and learning rate in hindsight,
        ``[draw, mark]``.
        """
        static = np.stack(list(self.reference.values()))
        return {arm.name: resampling.regrets(arm.losses, static) for arm in self.arms}

    def frontier(self) -> tuple[list[str], FloatArray]:
        """Return the best static size and learning rate at each mark, and their mean losses ``[mark]``."""
        losses = np.stack([own.mean(axis=0) for own in self.reference.values()])
        known = np.where(np.isnan(losses), np.inf, losses)
        names = list(self.reference)
        return [names[best] for best in known.argmin(axis=0)], known.min(axis=0)


class StudyTable(NamedTuple):
    """Table of a study with a title, and a caption that explains the table."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    caption: str
    foot: Sequence[str] = ()
    """Last row of the table, for texts below the columns of numbers; empty if there is none."""

    def markdown(self) -> str:
        """Return the table of a study as Markdown."""
        rows = [[cell.replace("|", "\\|") for cell in row] for row in (*self.rows, self.foot) if row]
        lines = [self.columns, ["---"] * len(self.columns), *rows]
        return "\n".join(
            [f"## {self.title}", "", *(f"| {' | '.join(line)} |" for line in lines), "", self.caption]
        )


def render_study(found: Sequence[StudyNumbers], name: str) -> str:
    """Render the page of a study as HTML."""
    sections = [(study_pictures(task), study_tables(task)) for task in found]
    return render("study.html", title=name, served=False, sections=sections)


# --- tables -----------------------------------------------------------------------------------------


def study_tables(found: StudyNumbers) -> list[StudyTable]:
    """Return all tables of a study on one task; tables of regret need static arms."""
    tables = [_losses(found)]
    if found.reference:
        tables += [_regrets(found), _needed(found)]
    return [table for table in (*tables, _at_the_end(found), _spending(found)) if table.rows]


def _losses(found: StudyNumbers) -> StudyTable:
    rows = [[arm.name, *_numbers("{:.3f}", arm.losses.mean(axis=(0, 1))), arm.note] for arm in found.arms]
    return StudyTable(
        f"{found.task}: test loss by compute",
        ["arm", *found.compute, "chosen"],
        rows,
        f"Means over {len(found.rng_seeds)} rng seeds from {found.rng_seeds.start} on, all arms alike.",
    )


def _regrets(found: StudyNumbers) -> StudyTable:
    above = found.regrets()
    plans = [above[arm.name] for arm in found.arms if arm.is_plan]
    grown = {arm.name: arm.grown for arm in found.arms}
    if len(plans) > 1:
        above[BEST_PLAN], grown[BEST_PLAN] = np.min(plans, axis=0), np.zeros(len(found.marks), dtype=bool)

    def row(name: str, values: FloatArray) -> list[str]:
        wanted = [np.ones(len(found.marks), dtype=bool), grown[name]]
        ends = [resampling.interval(resampling.largest(values, marks)) for marks in wanted]
        return [name, *_numbers("{:.1%}", values[0]), *(_text("{:.1%}", end) for end in ends)]

    return StudyTable(
        f"{found.task}: regret by compute",
        ["arm", *found.compute, "largest (95 %)", "largest after growth (95 %)"],
        [row(*own) for own in above.items()],
        "Regret: mean over rng seeds of the loss above that of the static size and learning rate that were"
        " best at the mark in hindsight, relative to it. Choices in hindsight, of the best plan too, and the"
        " maximum over marks are repeated in every bootstrap draw. After growth: only marks at which all"
        " networks of the arm had grown.",
        ["best static size × rate", *found.frontier()[0], "", ""],
    )


def _needed(found: StudyNumbers) -> StudyTable:
    frontier, marks = found.frontier()[1], found.marks
    losses = {arm.name: arm.losses.mean(axis=(0, 1)) for arm in found.arms}
    needed = {name: resampling.compute_needed(own, frontier, marks) for name, own in losses.items()}
    rows = [[name, *_numbers("{:.2f}", own)] for name, own in needed.items()]
    return StudyTable(
        f"{found.task}: compute that static sizes need for the same loss",
        ["arm", *found.compute],
        rows,
        "As a multiple of the compute that the arm spent, by the best static size and learning rate in"
        " hindsight; above 1 the arm saves compute. ∞: not reached within the budget. –: reached before the"
        " first mark.",
    )


def _at_the_end(found: StudyNumbers) -> StudyTable:
    control = found.arm(found.control).scores
    differences = {
        arm.name: resampling.paired(arm.scores, control) for arm in found.arms if arm.name != found.control
    }
    adjusted = resampling.holm({name: resampling.p_value(values) for name, values in differences.items()})
    rows = []
    for arm in found.arms:
        above, p = "", ""
        if arm.name in differences:
            above = _text("{:+.2f}", resampling.mean_interval(differences[arm.name]))
            p = _number("{:.3g}", adjusted[arm.name])
        score = _text("{:.2f}", resampling.mean_interval(arm.scores))
        rows.append([arm.name, score, above, p, _number("{:,.0f}", float(arm.params[-1]))])
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
        ["arm", *shown.values(), "CPU time"],
        [
            [arm.name, *(_flop(arm.flops[name]) for name in shown), *_numbers("{:.1f} s", arm.seconds[-1:])]
            for arm in found.arms
        ],
        "Means of whole runs. What is charged beyond training is what growth costs; one validation a step is"
        " an instrument that every arm has. CPU time includes it.",
    )


# --- pictures ---------------------------------------------------------------------------------------


def study_pictures(found: StudyNumbers) -> list[tuple[str, Picture]]:
    """Return the charts of a study on one task with their titles; the chart of regret needs static arms."""
    pictures = [(f"{found.task}: loss against compute", draw_compute(found))]
    if found.reference:
        pictures.append((f"{found.task}: regret against compute", draw_regret(found)))
    return [*pictures, (f"{found.task}: loss against parameters", draw_parameters(found))]


def draw_compute(found: StudyNumbers) -> Picture:
    """Draw test loss by compute: static arms (hosts that never grow) as thin lines, their minimum as a dotted
    line, other arms as thick lines.
    """
    losses = {arm.name: arm.losses.mean(axis=(0, 1)) for arm in found.arms}
    best = found.frontier()[1] if found.reference else None
    return Picture(
        _over_compute("Test loss by compute", found, losses, best),
        [],
        [],
        "Test loss of the network that a run with so much compute ends with, mean over rng seeds. Thin:"
        " static sizes. Dotted: the best static size and learning rate at each mark. Thick: all other arms.",
    )


def draw_regret(found: StudyNumbers) -> Picture:
    """Draw the regret of all arms in per cent by compute."""
    regrets = {name: 100.0 * above[0] for name, above in found.regrets().items()}
    return Picture(
        _over_compute("Regret by compute", found, regrets, np.zeros(len(found.marks))),
        [],
        [],
        "Per cent above the best static size and learning rate at each mark in hindsight, the dotted line.",
    )


def _over_compute(
    title: str, found: StudyNumbers, values: Mapping[str, FloatArray], dotted: FloatArray | None
) -> str:
    """Draw a value of each arm by compute. Static arms are drawn first, then the dotted reference, then the
    other arms.
    """
    at = [mark * found.budget for mark in found.marks]

    def curve(name: str, own: FloatArray, look: str) -> Curve:
        return Curve(name, list(zip(at, own.tolist(), strict=True)), look)

    curves = [curve(arm.name, values[arm.name], "thin faint") for arm in found.arms if arm.is_static]
    curves += [] if dotted is None else [curve("", dotted, "twin")]
    curves += [curve(arm.name, values[arm.name], "line") for arm in found.arms if not arm.is_static]
    return draw_curves(title, "compute", dict(zip(at, found.compute, strict=True)), curves)


def draw_parameters(found: StudyNumbers) -> Picture:
    """Draw test loss by parameters at the end of the budget, with static arms connected by a line."""
    ends = {arm.name: (float(arm.params[-1]), float(arm.losses[..., -1].mean())) for arm in found.arms}
    static = sorted(ends[arm.name] for arm in found.arms if arm.is_static)
    curves = [Curve(name, [end], "dots") for name, end in ends.items()]
    joined = [Curve("", static, "thin")] if static else []
    labels = {params: notation.count(params) for params, _ in sorted(ends.values()) if not math.isnan(params)}
    return Picture(
        draw_curves("Test loss by parameters", "parameters", labels, [*joined, *curves]),
        [],
        [],
        f"Networks that cost {found.compute[-1]} to train. Line: static sizes.",
    )


# --- numbers ----------------------------------------------------------------------------------------


def _number(form: str, value: float) -> str:
    """Format a number; "∞" if it is infinite, "–" if it is NaN."""
    if math.isinf(value):
        return "∞"
    return notation.UNKNOWN if math.isnan(value) else form.format(value).replace("%", " %")


def _numbers(form: str, values: Iterable[float]) -> list[str]:
    return [_number(form, value) for value in values]


def _text(form: str, found: Interval) -> str:
    value, low, high = _numbers(form, found)
    return value if math.isnan(found.low) else f"{value} ({low} to {high})"


def _flop(value: float) -> str:
    return notation.UNKNOWN if math.isnan(value) else notation.flop(value)
