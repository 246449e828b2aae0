from pathlib import Path
from typing import Annotated

import pytest

from esper.leyline.columns import COLUMNS, columns_of
from esper.leyline.events import TABLES, Column, Row
from esper.nissa.schema import band, metrics_markdown

ROOT = Path(__file__).parents[2]


def test_columns_stand_in_the_order_in_which_they_are_written():
    names = [column.name for column in COLUMNS["resource"]]
    assert names == ["t", "rss_mb", "rows_written", "writer_ms", "disk_free_mb"]


def test_a_column_carries_type_unit_and_meaning_of_its_row():
    column = next(column for column in COLUMNS["seed"] if column.name == "contribution")

    assert column.type_name == "number"
    assert column.may_be_unknown
    assert column.unit == "points"
    assert column.meaning == "Score lost with this slot off."


@pytest.mark.parametrize("table", TABLES)
def test_every_column_has_a_unit_and_a_meaning(table):
    assert all(column.unit and column.meaning for column in COLUMNS[table])


@pytest.mark.parametrize(
    ("table", "floats", "nested"),
    [
        ("run", {"t"}, {"config", "hardware"}),
        ("transition", {"t", "score", "contribution"}, set()),
        ("counterfactual", {"t", "score", "loss"}, set()),
        ("decision", {"t", "value", "reward"}, {"log_probs", "op_probs", "reward_terms"}),
    ],
)
def test_the_columns_in_which_a_float_may_stand_are_known(table, floats, nested):
    assert {column.name for column in COLUMNS[table] if column.is_float} == floats
    assert {column.name for column in COLUMNS[table] if column.nests_floats} == nested


def test_a_column_without_unit_and_meaning_is_refused():
    class Bare(Row, kw_only=True):
        height: int

    with pytest.raises(RuntimeError, match="column 'height' of table 'trees' needs exactly one Column"):
        columns_of("trees", Bare)


def test_a_column_of_two_types_is_refused():
    class Mixed(Row, kw_only=True):
        height: Annotated[int | str | None, Column("m", "Height.")]

    with pytest.raises(RuntimeError, match="one type, or that type and None"):
        columns_of("trees", Mixed)


def test_a_list_of_numbers_counts_as_a_place_for_floats():
    class Listed(Row, kw_only=True):
        entropy: Annotated[list[float] | None, Column("fraction", "Per head.")]

    entropy = columns_of("update", Listed)[-1]

    assert (entropy.type_name, entropy.is_float, entropy.nests_floats) == ("list of number", False, True)


def test_the_reference_for_users_says_what_the_code_says():
    found = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")

    assert found == metrics_markdown(), "run: python -m esper.nissa.schema > docs/metrics.md"


def test_the_reference_names_every_table_and_says_where_null_may_stand():
    text = metrics_markdown()

    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == list(TABLES)
    assert "| `twin_score` | number or null | score |  | Validation score of the do-nothing twin. |" in text
    assert "| `val_score` | number | score |  | Validation score after the epoch, 0-100. |" in text


def test_the_reference_shows_the_healthy_band_and_the_range_of_a_unit():
    text = metrics_markdown()

    assert "| `gradient_health` | number or null | fraction | ≥ 0.7 | 1 is healthy, 0 is not. |" in text
    assert "| `forced_share` | number | fraction | ≤ 0.6 | Rows in which no head had a choice. |" in text
    assert "A score lies between 0 and 100." in text


def test_a_band_of_two_edges_is_carried_and_shown():
    class Banded(Row, kw_only=True):
        heat: Annotated[float, Column("K", "Heat.", low=1.0, high=2.5)]

    heat = columns_of("stoves", Banded)[-1]

    assert (heat.low, heat.high) == (1.0, 2.5)
    assert band(heat) == "1 to 2.5"


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
def test_every_column_has_one_type_in_sql(table, column, sql_type):
    assert next(spec.sql_type for spec in COLUMNS[table] if spec.name == column) == sql_type
