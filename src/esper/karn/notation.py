"""Number formats of all reports, pages and terminal views. An unknown value (None) is shown as "–", never as
0.
"""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from esper.karn.statistics import mean

UNKNOWN: Final = "–"
BLOCKS: Final = "▁▂▃▄▅▆▇█"
_FLOP_UNITS: Final = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP")


def points(value: float | None, decimals: int = 1) -> str:
    """Format a score or a loss with a fixed number of decimals."""
    return UNKNOWN if value is None else f"{value:.{decimals}f}"


def gain(value: float | None, decimals: int = 1) -> str:
    """Format a difference with a fixed number of decimals, always with its sign."""
    # Adding 0.0 turns the number -0.0 into 0.0.
    return UNKNOWN if value is None else f"{round(value, decimals) + 0.0:+.{decimals}f}"


def difference(value: float | None, reference: float | None) -> float | None:
    """Return ``value - reference``, or None if one of them is None."""
    return None if value is None or reference is None else value - reference


def count(value: float | None) -> str:
    """Format a count, or a mean of counts, with thousands separators."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def share(value: float | None) -> str:
    """Format a fraction in per cent; a positive fraction that would be displayed as 0 is shown as "<1 %"."""
    if value is None:
        return UNKNOWN
    return "<1 %" if 0 < value < 0.005 else f"{100 * value:.0f} %"


def significant(value: float | None) -> str:
    """Format a number of any magnitude with three significant digits."""
    return UNKNOWN if value is None else f"{value:.3g}"


def duration(milliseconds: float | None) -> str:
    """Format a duration in milliseconds, seconds or h:mm:ss, depending on its length."""
    if milliseconds is None:
        return UNKNOWN
    if milliseconds < 999.5:
        return f"{milliseconds:.3g} ms"
    return f"{milliseconds / 1000:.3g} s" if milliseconds < 999_500 else clock(milliseconds / 1000)


def factor(value: float | None, reference: float | None) -> str:
    """Format ``value / reference`` as a factor, such as "×1.50"; "–" if the reference is None or 0."""
    if value is None or not reference:
        return UNKNOWN
    ratio = value / reference
    return f"×{ratio:.2f}" if ratio < 10 else f"×{ratio:.0f}"


def flop(value: float | None) -> str:
    """Format FLOPs with three significant digits and the matching unit."""
    if value is None:
        return UNKNOWN
    scaled, unit = value, 0
    # From 999.5 on, a number of FLOPs would be rounded to 1000 in its unit, so the next larger unit is used.
    while scaled >= 999.5 and unit < len(_FLOP_UNITS) - 1:
        scaled, unit = scaled / 1000, unit + 1
    decimals = 0 if unit == 0 or scaled >= 99.95 else 1 if scaled >= 9.995 else 2
    return f"{scaled:.{decimals}f} {_FLOP_UNITS[unit]}"


def clock(seconds: float | None) -> str:
    """Format seconds as h:mm:ss."""
    if seconds is None:
        return UNKNOWN
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def written(value: object) -> str:
    """Format a value as JSON; a string is returned without quotes, and None as "–"."""
    if value is None:
        return UNKNOWN
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def cell(value: object) -> str:
    """Format one value of the result of a SQL query."""
    return f"{value:.6g}" if isinstance(value, float) else written(value)


def aligned(lines: Sequence[Sequence[str]], left: int) -> str:
    """Return a text table; its first ``left`` columns are aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    formats = [f"{{:{'<' if i < left else '>'}{width}}}" for i, width in enumerate(widths)]
    return "\n".join("  ".join(formats).format(*line).rstrip() for line in lines)


def condense(values: Sequence[float | None], columns: int) -> list[float | None]:
    """Shorten a series to at most ``columns`` values, each the mean of neighbouring values. Values of None
    are not averaged; the mean of none but such values is None.
    """
    if len(values) <= columns:
        return list(values)
    edges = [column * len(values) // columns for column in range(columns + 1)]
    return [mean(values[start:end]) for start, end in pairwise(edges)]


def trend(
    values: Sequence[float | None], columns: int, low: float | None = None, high: float | None = None
) -> str:
    """Draw a series as at most ``columns`` block characters; unknown values are blanks.

    The block characters span the range of the series unless ``low`` or ``high`` limits the range.
    """
    shown = condense(values, columns)
    own_low, own_high = shared_scale(shown)
    bottom, top = own_low if low is None else low, own_high if high is None else high
    span = (top - bottom) or 1.0
    fractions = (None if value is None else (value - bottom) / span for value in shown)
    return "".join(
        " " if part is None else BLOCKS[round(min(max(part, 0.0), 1.0) * (len(BLOCKS) - 1))]
        for part in fractions
    )


def shared_scale(values: Sequence[float | None]) -> tuple[float, float]:
    """Return the minimum and maximum of the known values, as a common scale for several series."""
    known = [value for value in values if value is not None]
    return min(known, default=0.0), max(known, default=0.0)
