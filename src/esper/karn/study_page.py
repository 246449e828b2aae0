"""Page of a study as one HTML file: loss by compute, loss by parameters, and the tables."""

import math
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from esper.karn import notation
from esper.karn.drawing.curves import Curve, draw_curves
from esper.karn.drawing.picture import Picture
from esper.karn.page.rendering import render_page
from esper.karn.resampling import FloatArray, regret
from esper.karn.study_tables import StudyNumbers, number, study_tables


def render_study(found: Sequence[StudyNumbers], name: str) -> str:
    """Render the page of a study as HTML."""
    sections = [(study_pictures(task), study_tables(task)) for task in found]
    return render_page("study.html", title=name, served=False, sections=sections)


def study_pictures(found: StudyNumbers) -> list[tuple[str, Picture]]:
    """Return the pictures of a task with their titles; regret needs static arms."""
    pictures = [(f"{found.task}: loss against compute", draw_compute(found))]
    if found.reference:
        pictures.append((f"{found.task}: regret against compute", draw_regret(found)))
    return [*pictures, (f"{found.task}: loss against parameters", draw_parameters(found))]


def draw_compute(found: StudyNumbers) -> Picture:
    """Draw loss by compute: static arms thin, their minimum dotted, other arms thick."""
    losses = {arm.name: arm.losses.mean(axis=(0, 1)) for arm in found.arms}
    static = [losses[arm.name] for arm in found.arms if arm.is_static]
    return Picture(
        _over_compute("Test loss by compute", found, losses, np.min(static, axis=0) if static else None),
        ["arm", *found.compute],
        [[name, *map(partial(number, "{:.3f}"), values)] for name, values in losses.items()],
        "Test loss of the network that a run with so much compute ends with, mean over rng seeds. Thin:"
        " static sizes. Dotted: the best of them at each mark. Thick: all other arms.",
    )


def draw_regret(found: StudyNumbers) -> Picture:
    """Draw the regret in per cent by compute."""
    regrets = {name: 100.0 * regret(above) for name, above in found.excesses().items()}
    return Picture(
        _over_compute("Regret by compute", found, regrets, np.zeros(len(found.marks))),
        ["arm", *found.compute],
        [[name, *map(partial(number, "{:.1f}"), values)] for name, values in regrets.items()],
        "Per cent above the static size that was best at each mark, the dotted line.",
    )


def _over_compute(
    title: str, found: StudyNumbers, values: Mapping[str, FloatArray], dotted: FloatArray | None
) -> str:
    """Draw values by compute: static arms first, then the dotted reference, then the other arms."""
    at = [mark * found.budget for mark in found.marks]

    def curve(name: str, own: FloatArray, look: str) -> Curve:
        return Curve(name, list(zip(at, own.tolist(), strict=True)), look)

    curves = [curve(arm.name, values[arm.name], "thin faint") for arm in found.arms if arm.is_static]
    curves += [] if dotted is None else [curve("", dotted, "twin")]
    curves += [curve(arm.name, values[arm.name], "line") for arm in found.arms if not arm.is_static]
    return draw_curves(title, "compute", dict(zip(at, found.compute, strict=True)), curves)


def draw_parameters(found: StudyNumbers) -> Picture:
    """Draw loss by parameters at the end of the budget, with static arms connected by a line."""
    ends = {arm.name: (float(arm.params[-1]), float(arm.losses[..., -1].mean())) for arm in found.arms}
    static = sorted(ends[arm.name] for arm in found.arms if arm.is_static)
    curves = [Curve(name, [end], "dots") for name, end in ends.items()]
    joined = [Curve("", static, "thin")] if static else []
    labels = {params: notation.count(params) for params, _ in sorted(ends.values()) if not math.isnan(params)}
    return Picture(
        draw_curves("Test loss by parameters", "parameters", labels, [*joined, *curves]),
        ["arm", "parameters", "test loss"],
        [[name, number("{:,.0f}", params), number("{:.3f}", loss)] for name, (params, loss) in ends.items()],
        f"Networks that cost {found.compute[-1]} to train. Line: static sizes.",
    )
