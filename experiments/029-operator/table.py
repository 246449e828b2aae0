"""Table of the operator study: paired differences of the test loss to the network that never grows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from esper.karn.statistics import Estimate, estimate

Row = dict[str, Any]
TIMES = {5: "12.5 %", 14: "35 %", None: ""}


def losses(rows: Sequence[Row], family: str, arm: str, at: int | None) -> dict[int, float]:
    """Return the test losses of an arm by rng seed."""
    same = (row for row in rows if (row["family"], row["arm"], row["at"]) == (family, arm, at))
    return {row["rng_seed"]: row["test_loss"] for row in same}


def difference(rows: Sequence[Row], family: str, arm: Any, control: Any) -> Estimate | None:
    """Return the mean relative difference of the test loss to a control in percent, paired by rng seed."""
    ours, theirs = losses(rows, family, *arm), losses(rows, family, *control)
    both = sorted(ours.keys() & theirs.keys())
    return estimate([100 * math.log(ours[s] / theirs[s]) for s in both]) if both else None


def _cell(found: Estimate | None) -> str:
    if found is None:
        return ""
    return f"{found.mean:+.2f}" + ("" if found.margin is None else f" ± {found.margin:.2f}")


def _table(
    arms: Sequence[tuple[str, int | None]], families: Sequence[str], cell: Callable[[Any, str], str]
) -> list[str]:
    lines = [f"| arm | grown at | {' | '.join(families)} |", "|---|---|" + "---|" * len(families)]
    for arm in arms:
        cells = [cell(arm, family) for family in families]
        lines.append(f"| {arm[0]} | {TIMES[arm[1]]} | {' | '.join(cells)} |")
    return lines


def over_families(rows: Sequence[Row], families: Sequence[str], arm: Any, control: Any) -> Estimate | None:
    """Return the mean over families of the mean difference, with the interval over families."""
    means = [found.mean for f in families if (found := difference(rows, f, arm, control))]
    return estimate(means) if means else None


def write_table(rows: Sequence[Row], path: Path) -> None:
    """Write the tables of all arms as Markdown."""
    families = list(dict.fromkeys(row["family"] for row in rows))
    arms = list(dict.fromkeys((row["arm"], row["at"]) for row in rows))
    arms.sort(key=lambda arm: -1 if arm[1] is None else arm[1])
    never = ("never", None)
    seeds = {family: len(losses(rows, family, *never)) for family in families}
    lines = [
        "Test loss at the end of the budget, relative to the network that never grows, in % (log ratio; below"
        " zero is better); mean over paired rng seeds with 95 % intervals.",
        "",
        *_table(arms, families, lambda arm, family: _cell(difference(rows, family, arm, never))),
        "",
        "Relative to a zero-born block grown at the same time without any treatment of the old part, in %;"
        " the last column is the mean over families, with the interval over families.",
        "",
        "| arm | grown at | " + " | ".join(families) + " | mean |",
        "|---|---|" + "---|" * (len(families) + 1),
    ]
    for arm in arms:
        if arm[1] is None or arm[0] == "zero-born":
            continue
        control = ("zero-born", arm[1])
        cells = [_cell(difference(rows, family, arm, control)) for family in families]
        mean = _cell(over_families(rows, families, arm, control))
        lines.append(f"| {arm[0]} | {TIMES[arm[1]]} | {' | '.join(cells)} | {mean} |")
    rollbacks = sum(row["rollbacks"] for row in rows)
    lines += [
        "",
        "Test loss of the network that never grows: "
        + ", ".join(f"{f} {fmean(losses(rows, f, *never).values()):.4f}" for f in families if seeds[f])
        + ".",
        f"Rng seeds: {', '.join(f'{family} {count}' for family, count in seeds.items())}."
        f" Rollbacks of the governor: {rollbacks}.",
    ]
    path.write_text("\n".join(lines) + "\n")
