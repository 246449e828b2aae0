"""Stylesheet of all charts: colours, text, and the CSS classes of shapes.

On a page, each chart is in an HTML element of class ``picture``; if the element is narrow, the text of the
chart is larger.
"""

from importlib.resources import files
from typing import Final

from esper.karn.palette import LOOKS, SEVERITIES, css_variables, stage_variable

LEVELS: Final = 10
"""Number of steps from the lightest to the darkest shade; the CSS classes of the shades are ``shade-0`` to
``shade-10``.
"""
_PART_OPACITIES: Final = (0.72, 0.46, 0.28, 0.15, 0.6, 0.36)
"""Opacities of the CSS classes ``part-0``, ``part-1`` and so on, which distinguish the parts of a stacked
column if the chart has one colour.
"""


def part_look(index: int) -> str:
    """Return the CSS class of a part of stacked columns, by the index of the part in the stack."""
    return f"part part-{index % len(_PART_OPACITIES)}"


def shade_look(fraction: float) -> str:
    """Return the CSS class of the shade for a fraction between 0 and 1."""
    return f"shade-{round(min(max(fraction, 0.0), 1.0) * LEVELS)}"


def _coloured() -> str:
    rules = [
        f".esper .shade-{level}{{fill:var(--ink);fill-opacity:{0.06 + 0.72 * level / LEVELS:.2f}}}"
        for level in range(LEVELS + 1)
    ]
    rules += [
        f".esper .part-{index}{{fill-opacity:{opacity}}}" for index, opacity in enumerate(_PART_OPACITIES)
    ]
    colours = {stage.name.lower(): stage_variable(stage) for stage in LOOKS}
    for name, colour in (colours | {severity: f"--{severity}" for severity in SEVERITIES}).items():
        rules.append(f".esper .{name}{{fill:var({colour})}}.esper .{name}-line{{stroke:var({colour})}}")
    return "\n".join(rules) + "\n"


_SHAPES: Final = files("esper.karn.drawing").joinpath("shapes.css").read_text(encoding="utf-8")
STYLE: Final = css_variables() + _SHAPES + _coloured()
"""Stylesheet that every page with a chart must include."""
