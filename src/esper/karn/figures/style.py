"""The one stylesheet of all drawings: inks, text and what the classes of their shapes mean.

A page puts each drawing into an element of class ``picture``; where that is narrow, text is drawn larger.
"""

from __future__ import annotations

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
.esper text.ghost{fill:var(--dim)}
.esper text.strong{font-weight:600}
.esper text.halo{paint-order:stroke;stroke:var(--paper);stroke-width:3px;stroke-linejoin:round}
.esper path{fill:none;stroke-linejoin:round}
.esper .grid{stroke:var(--grid);stroke-width:1}
.esper .axis{stroke:var(--ghost);stroke-width:1}
.esper .line{stroke:var(--ink);stroke-width:2;stroke-linecap:round}
.esper .thin{stroke:var(--ink);stroke-width:1.2;stroke-linecap:round}
.esper .twin{stroke:var(--ghost);stroke-width:2;stroke-linecap:round;stroke-dasharray:1 4}
.esper .fan{fill:var(--ink);fill-opacity:.1}
.esper .fan.inner{fill-opacity:.16}
.esper .gain{fill:var(--ink);fill-opacity:.07}
.esper .tint{fill-opacity:.22}
.esper .mark{stroke:var(--paper);stroke-width:1.2}
.esper .ring{stroke:var(--ink);stroke-width:1.2}
.esper .cooling{stroke-width:3;stroke-dasharray:2 4}
.esper .cut{stroke-width:1.6;stroke-linecap:round}
.esper .guide{stroke:var(--ghost);stroke-width:1;stroke-dasharray:1 3}
.esper .empty{stroke:var(--grid);stroke-width:2}
"""


def _coloured() -> str:
    rules = [
        f".esper .{stage.name.lower()}{{fill:var({stage_variable(stage)})}}"
        f".esper .{stage.name.lower()}-line{{stroke:var({stage_variable(stage)})}}"
        for stage in LOOKS
    ]
    rules += [
        f".esper .{severity}{{fill:var(--{severity})}}.esper .{severity}-line{{stroke:var(--{severity})}}"
        for severity in SEVERITIES
    ]
    return "\n".join(rules) + "\n"


STYLE: Final = css_variables() + _SHAPES + _coloured()
"""What every page that shows a drawing must hold."""
