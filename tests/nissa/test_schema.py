from pathlib import Path
from typing import Annotated

import pytest

from esper.leyline.columns import COLUMNS, columns_of
from esper.leyline.rows import TABLES, Column, Row
from tools.make_reference import band, metrics_markdown

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("table", "floats", "nested"),
    [
        ("run", {"t"}, {"config", "hardware"}),
        ("transition", {"t", "score", "contribution"}, set()),
        ("counterfactual", {"t", "score", "loss"}, set()),
        ("decision", {"t", "value", "reward"}, {"log_probs", "op_probs", "reward_terms"}),
    ],
)
def test_column_specifications_mark_the_telemetry_columns_that_may_contain_floats(table, floats, nested):
    assert {column.name for column in COLUMNS[table] if column.is_float} == floats
    assert {column.name for column in COLUMNS[table] if column.nests_floats} == nested


@pytest.mark.parametrize(
    ("hint", "refusal"),
    [
        (int, "column 'height' of table 'trees' needs exactly one Column"),
        (Annotated[int | str | None, Column("m", "Height.")], "one type, or that type and None"),
        (Annotated[set[int], Column("m", "Height.")], "flat values, lists and maps of them; found set"),
    ],
)
def test_telemetry_column_without_description_or_with_an_unsupported_type_is_refused(hint, refusal):
    class Tree(Row, kw_only=True):
        height: hint

    with pytest.raises(RuntimeError, match=refusal):
        columns_of("trees", Tree)


def test_specification_of_a_telemetry_column_has_type_unit_and_normal_range():
    class Stove(Row, kw_only=True):
        heat: Annotated[list[float] | None, Column("K", "Heat.", low=1.0, high=2.5)]

    heat = columns_of("stoves", Stove)[-1]

    assert (heat.name, heat.unit, heat.meaning, heat.may_be_unknown) == ("heat", "K", "Heat.", True)
    assert (heat.type_name, heat.is_float, heat.nests_floats) == ("list of number", False, True)
    assert (heat.low, heat.high) == (1.0, 2.5)
    assert band(heat) == "1 to 2.5"


def test_metrics_reference_in_the_documentation_equals_the_telemetry_schema():
    found = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")

    assert found == metrics_markdown(), "run: python -m tools.make_reference"
    assert [line[3:] for line in found.splitlines() if line.startswith("## ")] == list(TABLES)
    for line in (
        "| `twin_score` | number or null | score |  | Validation score of the do-nothing twin. |",
        "| `val_score` | number or null | score |  | Validation score after the epoch, 0-100. |",
        "| `gradient_health` | number or null | fraction | ≥ 0.7 | 1 is healthy, 0 is not. |",
        "| `forced_share` | number | fraction | ≤ 0.6 | Rows without any choice. |",
        "A score lies between 0 and 100.",
    ):
        assert line in found.splitlines()


@pytest.mark.parametrize(
    ("table", "column", "sql_type"),
    [
        ("run", "config", "JSON"),
        ("run", "versions", "MAP(VARCHAR, VARCHAR)"),
        ("run", "head_choices", "VARCHAR[][]"),
        ("decision", "masked", "BOOLEAN[]"),
        ("decision", "log_probs", "DOUBLE[]"),
        ("decision", "reward_terms", "MAP(VARCHAR, DOUBLE)"),
        ("transition", "cause", "VARCHAR"),
        ("update", "explosion", "JSON"),
        ("update", "early_stop_update_epoch", "BIGINT"),
    ],
)
def test_telemetry_columns_have_the_expected_sql_types(table, column, sql_type):
    assert next(spec.sql_type for spec in COLUMNS[table] if spec.name == column) == sql_type
