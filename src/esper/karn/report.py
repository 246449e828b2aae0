"""Report of a run as one self-contained HTML file."""

from collections.abc import Sequence
from typing import Final

from markupsafe import Markup

from esper.karn.headline import conclude
from esper.karn.page import sections
from esper.karn.page.rendering import render_page
from esper.karn.page.sections import KEYS, ORIGIN, Group, Section, run_section, section
from esper.karn.run import Run
from esper.karn.run_result import compare

GENERATOR: Final = '<meta name="generator" content="esper report">'
"""Element of the page by which ``esper report`` recognises a report that it may replace."""


def render_report(run: Run, against: Sequence[Run] = (), reproduction: str | None = None) -> str:
    """Render the report of a run as HTML.

    Args:
        run: Run to report.
        against: Runs to compare the reported run with.
        reproduction: Shell command that repeats the run; None if no command started the run.
    """
    conclusion = conclude(run, [compare(run, other) for other in against])
    bodies = {"conclusion": section("conclusion", "conclusion", conclusion)}
    if against:
        bodies["comparison"] = sections.comparison(sections.arm_names([run, *against]))
    bodies |= {key: sections.reported_section(run, key) for key in KEYS[1:]}
    origin = {"command": sections.command(run.row, reproduction)}
    origin |= {key: run_section(run, key) for key in ORIGIN}
    return render_page(
        "run.html",
        generator=Markup(GENERATOR),
        title=f"{run.row.name}: {run.row.task}, {run.row.controller}",
        served=False,
        path=run.path,
        groups=[
            Group("heads", [Section("", sections.head(run, run.row.name, served=False), "header", "head")]),
            Group("panels", [Section(key, body) for key, body in bodies.items()]),
            Group("origin", [Section(key, body) for key, body in origin.items()]),
        ],
    )
