"""Templates of the HTML pages, with number formats as Jinja filters. Text in HTML pages is escaped; None is
shown as "–".
"""

from functools import cache
from importlib.resources import files
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from esper.karn import notation
from esper.karn.drawing.picture import STYLE, numeric_columns
from esper.karn.palette import LOOKS, SEVERITIES, stage_variable
from esper.karn.runs import done_text

TREND: Final = 16
"""Largest number of characters of a trend (a series drawn as block characters)."""


def render(template: str, **content: Any) -> Markup:
    """Render an HTML page, or a part of one as markup that an enclosing template does not escape again."""
    return Markup(_environment().get_template(template).render(content))


@cache
def style() -> str:
    """Return the stylesheet of all pages: charts, layout, and glyphs in the colours of their stages."""
    glyphs = "".join(f".glyph.{one.name.lower()}{{color:var({stage_variable(one)})}}" for one in LOOKS)
    marks = "".join(
        f'.alert-{name}::before{{content:"{look.glyph} ";color:var(--{name})}}'
        for name, look in SEVERITIES.items()
    )
    return STYLE + files("esper.karn.page").joinpath("page.css").read_text(encoding="utf-8") + glyphs + marks


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("esper.karn.page"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        **{name: getattr(notation, name) for name in ("clock", "count", "factor", "significant")},
        "done": done_text,
        "glyph": lambda stage: LOOKS[stage].glyph,
        "numeric": numeric_columns,
        "trend": lambda scores: notation.trend(scores, TREND, low=0.0),
    }
    environment.globals["style"] = style
    return environment


def _shown(value: Any) -> Any:
    """Return a template value for display: None as "–", and "±" between spaces that do not break the line."""
    if value is None:
        return notation.UNKNOWN
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return value.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")
    return value
