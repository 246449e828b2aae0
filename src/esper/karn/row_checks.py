"""Checks that telemetry rows agree with the run row: rows of a damaged file can be valid alone."""

from collections.abc import Iterator, Sequence
from typing import Final

from esper.leyline import BLEND_IDS, HEAD_NAMES, STAGE_NAMES, EsperError
from esper.leyline.columns import COLUMNS, TABLE_OF
from esper.leyline.rows import DecisionRow, EpisodeRow, Row, RunRow, TransitionRow

LONGEST: Final = 10_000_000
"""Largest number of epochs or iterations that readers accept."""
LISTS: Final = {
    **dict.fromkeys(("action", "read", "masked", "log_probs", "head_entropy", "head_grad_norm"), "heads"),
    **dict.fromkeys(("op_probs", "op_shares", "op_counts"), "ops"),
    "on": "slots",
}
"""Columns with one entry per head, op or slot, and the column of the run row that has their names."""


def check_rows(row_type: type[Row], rows: Sequence[Row], run: RunRow) -> None:
    """Raise ``EsperError`` for the first row with a number or a list that the run row does not allow, and for
    an episode that has two rows.
    """
    ranges, lengths = list(_ranges(row_type, run)), list(_lengths(row_type, run))
    ended = set()
    for number, row in enumerate(rows, start=1):
        problem = next(_problems(row, ranges, lengths, run), None)
        if isinstance(row, EpisodeRow):
            if (key := (row.env, row.episode, row.attempt)) in ended:
                problem = "its episode has a row already; remove one of the two"
            ended.add(key)
        if problem is not None:
            raise EsperError(f"row {number} of table '{TABLE_OF[row_type]}' is damaged: {problem}")


def _problems(
    row: Row, ranges: Sequence[tuple[str, int, int]], lengths: Sequence[tuple[str, int]], run: RunRow
) -> Iterator[str]:
    for name, low, high in ranges:
        value = getattr(row, name)
        if value is not None and not low <= value < high:
            yield f"{name} is {value}, and must be {low} to {high - 1}"
    for name, length in lengths:
        entries = getattr(row, name)  # None if unknown, and empty if an update was skipped
        if entries and len(entries) != length:
            yield f"{name} has {len(entries)} entries, and must have {length}"
    if isinstance(row, DecisionRow):
        yield from _unknown_choices(row, run)
    if isinstance(row, RunRow) and (tuple(row.heads), len(row.head_choices)) != (HEAD_NAMES, len(HEAD_NAMES)):
        known = f"this version of esper reads those of {', '.join(HEAD_NAMES)}"
        yield f"it has the choices of the heads {', '.join(row.heads) or 'none'}, and {known}"


def _unknown_choices(row: DecisionRow, run: RunRow) -> Iterator[str]:
    counts = map(len, (run.ops, run.slots, *run.head_choices[2:]))
    if len(row.action) != len(HEAD_NAMES):
        yield "its action has no value for some heads"
    for head, choice, count in zip(HEAD_NAMES, row.action, counts, strict=False):
        if not 0 <= choice < count:
            yield f"head {head} has no choice {choice}"


def _ranges(row_type: type[Row], run: RunRow) -> Iterator[tuple[str, int, int]]:
    """Yield each whole-number column of a row type with its lowest value and its limit."""
    counts = {"slot": len(run.slots), "blueprint": len(run.blueprints), "style": len(BLEND_IDS)}
    counts |= dict.fromkeys(("stage", "from_stage", "to_stage"), len(STAGE_NAMES))
    for column in COLUMNS[TABLE_OF[row_type]]:
        if column.sql_type == "BIGINT":
            longest = LONGEST + 1 if column.unit in ("epoch", "iteration") else 2**63
            # A transition of an empty slot has no seed, which is -1.
            low = -1 if row_type is TransitionRow and column.name in ("seed", "blueprint") else 0
            yield column.name, low, counts.get(column.name, longest)


def _lengths(row_type: type[Row], run: RunRow) -> Iterator[tuple[str, int]]:
    """Yield each list column of a row type that has one entry per head, op or slot, with its length."""
    for name in row_type.__struct_fields__:
        if name in LISTS:
            yield name, len(getattr(run, LISTS[name]))
