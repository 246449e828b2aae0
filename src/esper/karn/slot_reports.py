"""Text table of the slots of a network, from reports of single slots."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from esper.karn.notation import UNKNOWN, aligned, count, significant
from esper.leyline import SeedStateReport


def slot_report_table(reports: Sequence[SeedStateReport]) -> str:
    """Return a text table with one line per slot; an unknown value is shown as "–".

    Example:
        >>> print(slot_report_table(env.reports()))
        slot  stage     blueprint   age  parameters  alpha  contribution  Shapley value
        r0c0  DORMANT   –             –           –      –             –              –
        r0c1  BLENDING  conv_light    6         148    0.5   3.1 ± 0.84            2.9
    """
    cells = [[cell(report) for cell in COLUMNS.values()] for report in reports]
    return aligned([list(COLUMNS), *cells], left=3)


def _contribution(report: SeedStateReport) -> str:
    error = "" if report.contribution_error is None else f" ± {report.contribution_error:.2g}"
    return significant(report.counterfactual_contribution) + error


COLUMNS: Final[Mapping[str, Callable[[SeedStateReport], str]]] = {
    "slot": lambda report: report.slot_id,
    "stage": lambda report: report.stage.name,
    "blueprint": lambda report: report.blueprint_id or UNKNOWN,
    "age": lambda report: count(report.age),
    "parameters": lambda report: count(report.seed_param_count),
    "alpha": lambda report: significant(report.alpha),
    "contribution": _contribution,
    "Shapley value": lambda report: significant(report.shapley_value),
}
"""Columns of the table: heading, and function that formats the cell of a slot."""
