"""A run as one HTML file that needs nothing else: the page of the run with everything in it."""

from __future__ import annotations

from collections.abc import Sequence

from esper.karn.conclusion import conclude
from esper.karn.figures import figure_named
from esper.karn.outcome import compare
from esper.karn.page import sections
from esper.karn.page.rendering import render_page
from esper.karn.page.sections import KEYS, Group, Section, section
from esper.karn.run import Run


def render_report(run: Run, against: Sequence[Run] = (), reproduction: str | None = None) -> str:
    """The page; ``reproduction`` is the command that does the same again, None if there is none."""
    shown = {
        "conclusion": section("conclusion", "conclusion", conclude(run, [compare(run, o) for o in against]))
    }
    if against:
        shown["comparison"] = sections.comparison(sections.arm_names([run, *against]))
    shown |= {
        key: section(key, "figure", figure_named(key).answer(run)) for key in KEYS if key in sections.SHOWN
    }
    shown |= {"lanes": sections.reported_lanes(run), "diary": sections.reported_diary(run)}
    origin = {
        "command": sections.command(run.row, reproduction),
        "configuration": sections.run_section(run, "configuration"),
        "environment": sections.run_section(run, "environment"),
    }
    order = ["conclusion", *(["comparison"] if against else []), *KEYS[1:]]
    return render_page(
        "run.html",
        title=f"{run.row.name}: {run.row.task}, {run.row.controller}",
        served=False,
        path=run.path,
        groups=[
            Group("heads", [Section("", sections.head(run, run.row.name, served=False), "header", "head")]),
            Group("panels", [Section(key, shown[key]) for key in order]),
            Group("origin", [Section(key, body) for key, body in origin.items()]),
        ],
    )
