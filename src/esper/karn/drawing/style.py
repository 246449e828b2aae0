"""Stylesheet of all drawings: colours, text, and the classes of shapes.

A page puts each drawing into an element of class ``picture``; text is larger where that element is narrow.
"""

from typing import Final

from esper.karn.palette import LOOKS, SEVERITIES, css_variables, stage_variable

_SHAPES: Final = """\
.picture{container-type:inline-size}
svg.esper{display:block;width:100%;height:auto;overflow:visible;color:var(--ink);\
font:12px system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;\
font-variant-numeric:tabular-nums}
@media (max-width:520px){svg.esper{font-size:16px}}
@container (max-width:520px){svg.esper{font-size:16px}}
@container (min-width:520.1px){svg.esper{font-size:12px}}
.esper text{fill:var(--ink)}
.esper text.dim{fill:var(--dim)}
.esper text.strong{font-weight:600}
.esper text.halo{paint-order:stroke;stroke:var(--paper);stroke-width:3px;stroke-linejoin:round}
.esper path{fill:none;stroke-linejoin:round}
.esper .grid{stroke:var(--grid);stroke-width:1}
.esper .axis{stroke:var(--ghost);stroke-width:1}
.esper .line{stroke:var(--ink);stroke-width:2;stroke-linecap:round}
.esper .thin{stroke:var(--ink);stroke-width:1.2;stroke-linecap:round}
.esper .twin{stroke:var(--twin);stroke-width:2;stroke-linecap:round;stroke-dasharray:1 4;\
vector-effect:non-scaling-stroke}
.esper .fan{fill:var(--ink);fill-opacity:.1}
.esper .fan.inner{fill-opacity:.16}
.esper .tint{fill-opacity:.25}
.esper .mark{stroke:var(--paper);stroke-width:1.2}
.esper .ring{stroke:var(--ink);stroke-width:1.2}
.esper .cooling{stroke-width:3;stroke-dasharray:2 4}
.esper .cut{stroke-width:1.6;stroke-linecap:round}
.esper text.on{fill:#14181d}
.esper .training-texture{stroke:var(--stage-training);stroke-dasharray:1.5 2.5}
.esper .holding-texture{stroke:var(--paper);stroke-dasharray:1 4}
.esper .guide{stroke:var(--ghost);stroke-width:1;stroke-dasharray:1 3}
.esper .dot{stroke:var(--ink);stroke-width:6;stroke-linecap:round}
.esper .small{stroke-width:4.5}
.esper .faint{stroke-opacity:.5}
.esper .spread{stroke:var(--ink);stroke-width:1.2;stroke-opacity:.45}
.esper .track{fill:var(--grid)}
.esper .inband{fill:var(--ink);fill-opacity:.08}
.esper .unread{stroke:var(--ghost);stroke-opacity:.55;stroke-dasharray:1.5 3}
.esper .hatch{stroke:var(--paper);stroke-dasharray:1.5 2.5}
.esper .idle{fill:var(--ghost);fill-opacity:.55}
.esper .part{fill:var(--ink)}
.esper .alert{stroke-width:8;stroke-linecap:round}
.esper .cell{stroke:var(--paper);stroke-width:2}
.esper .hits rect{fill:var(--ink);fill-opacity:0}
.esper .hits rect:hover{fill-opacity:.06}
.esper .empty{stroke:var(--grid);stroke-width:2}
"""
LEVELS: Final = 10
"""Number of shades for fractions, ``shade-0`` to ``shade-10``."""
_PART_OPACITIES: Final = (0.72, 0.46, 0.28, 0.15, 0.6, 0.36)
"""Opacities of parts without a stage or severity, ``part-0`` and so on."""


def part_look(index: int) -> str:
    """Return the CSS class of a part by its index in the stack."""
    return f"part part-{index % len(_PART_OPACITIES)}"


def shade_look(fraction: float) -> str:
    """Return the CSS class of a cell that shows a fraction."""
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


STYLE: Final = css_variables() + _SHAPES + _coloured()
"""Stylesheet that every page with a drawing must include."""
