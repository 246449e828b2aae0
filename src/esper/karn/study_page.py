"""A study as one HTML file: loss against compute and against parameters, and its tables."""

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from esper.karn import notation
from esper.karn.drawing import svg
from esper.karn.drawing.axes import Scale, apart, around, value_axis, y_axis
from esper.karn.drawing.picture import Picture
from esper.karn.page.rendering import render_page
from esper.karn.study_tables import ArmNumbers, StudyNumbers, study_tables

_LEFT: Final = 62.0
_ROOM: Final = 170.0
"""For names on the right."""
_TOP: Final = 14.0
_HEIGHT: Final = 300.0
_LETTERS: Final = 20
_TICKS: Final = 5
_NAMES: Final = {"twin": "dim halo", "line": "strong halo"}
"""How the name of a curve looks."""


class Curve(NamedTuple):
    """Points of one arm, of which some may be unknown."""

    name: str
    points: Sequence[tuple[float, float]]
    look: str
    """``line``, ``thin``, ``twin`` (dotted) or ``dots``."""


def render_study(found: Sequence[StudyNumbers], name: str) -> str:
    """The page of a study that is called ``name``."""
    sections = [(study_pictures(task), study_tables(task)) for task in found]
    return render_page("study.html", title=name, served=False, sections=sections)


def study_pictures(found: StudyNumbers) -> list[tuple[str, Picture]]:
    """The pictures of a task with their headings."""
    return [
        (f"{found.task}: loss against compute", draw_compute(found)),
        (f"{found.task}: loss against parameters", draw_parameters(found)),
    ]


def draw_compute(found: StudyNumbers) -> Picture:
    """Static sizes thin, what is best of them dotted, all others on it."""
    at = [mark * found.budget for mark in found.marks]
    static = [arm for arm in found.arms if arm.is_static]
    curves = [Curve(arm.name, _along(at, arm), "thin" if arm.is_static else "line") for arm in found.arms]
    if static:
        best = np.min([arm.losses.mean(axis=(0, 1)) for arm in static], axis=0)
        curves.insert(0, Curve("best static", list(zip(at, best.tolist(), strict=True)), "twin"))
    rows = [[arm.name, *(f"{loss:.3f}" for loss in arm.losses.mean(axis=(0, 1)))] for arm in found.arms]
    labels = dict(zip(at, found.compute, strict=True))
    return Picture(
        draw_curves("Test loss by compute", "compute", labels, curves),
        ["arm", *found.compute],
        rows,
        "Test loss of the network that a run with so much compute ends with, mean over rng seeds. Thin: static"
        " sizes. Dotted: the best of them at each mark. Thick: all other arms.",
    )


def draw_parameters(found: StudyNumbers) -> Picture:
    """The networks at the end of the budget, static sizes joined."""
    ends = {arm.name: (float(arm.params[-1]), float(arm.losses[..., -1].mean())) for arm in found.arms}
    static = sorted(ends[arm.name] for arm in found.arms if arm.is_static)
    curves = [Curve(name, [end], "dots") for name, end in ends.items()]
    joined = [Curve("", static, "thin")] if static else []
    labels = {params: notation.count(params) for params, _ in sorted(ends.values()) if not math.isnan(params)}
    return Picture(
        draw_curves("Test loss by parameters", "parameters", labels, [*joined, *curves]),
        ["arm", "parameters", "test loss"],
        [[name, notation.count(params), f"{loss:.3f}"] for name, (params, loss) in ends.items()],
        f"Networks that cost {found.compute[-1]} to train. Line: static sizes.",
    )


def draw_curves(title: str, axis: str, labels: Mapping[float, str], curves: Sequence[Curve]) -> str:
    """Curves over a logarithmic axis with these labels, as SVG."""
    known = [point for curve in curves for point in curve.points if not any(map(math.isnan, point))]
    bottom = _TOP + _HEIGHT
    if not known:
        return svg.drawing(bottom, title, "no arm has a known loss", svg.text(_LEFT, 40, "nothing to show", "dim"))
    ends = [math.log2(x) for x, _ in known]
    x = Scale(min(ends), max(ends), _LEFT, svg.WIDTH - _ROOM)
    y = Scale(*around([value for _, value in known], _TICKS), bottom, _TOP)
    drawn, names = [], []
    for curve in curves:
        points = [None if math.isnan(value) else (x(math.log2(at)), y(value)) for at, value in curve.points]
        seen = [point for point in points if point is not None]
        is_dot = curve.look == "dots"
        drawn.append(svg.path(svg.dots(seen), "dot small") if is_dot else svg.curve(points, curve.look))
        if curve.name and seen:
            names.append((curve, (seen[-1][0] if is_dot else x.stop) + 9, seen[-1][1]))
    heights = apart([height for _, _, height in names])
    return svg.drawing(
        bottom + 46,
        title,
        f"{len(names)} lines; the lowest loss is {min(value for _, value in known):.3f}.",
        y_axis(y, x.start, x.stop, most=_TICKS + 1),
        value_axis(x, bottom, axis, _thinned(x, labels)),
        *drawn,
        *(
            svg.text(at, height + 4, svg.shorten(curve.name, _LETTERS), _NAMES.get(curve.look, "halo"))
            for (curve, at, _), height in zip(names, heights, strict=True)
        ),
    )


def _along(at: Sequence[float], arm: ArmNumbers) -> list[tuple[float, float]]:
    return list(zip(at, arm.losses.mean(axis=(0, 1)).tolist(), strict=True))


def _thinned(x: Scale, labels: Mapping[float, str]) -> dict[float, str]:
    """Labels by place on the axis, without those that would touch the one before."""
    kept: dict[float, str] = {}
    free = -math.inf
    for value, text in sorted(labels.items()):
        place, half = math.log2(value), svg.width_of(text) / 2
        if x(place) - half >= free:
            kept[place] = text
            free = x(place) + half
    return kept
