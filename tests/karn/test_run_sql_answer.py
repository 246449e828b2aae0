from functools import partial

import pytest

from esper.karn.run import answer_query
from esper.karn.tables import QueryError
from tests.karn.serving import write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = write_run(tmp_path_factory.mktemp("runs") / "run")
    (directory / "config.json").write_text("{}")
    (directory.parent / "secret.csv").write_text("key,value\n1,2\n")
    return directory


ask = partial(answer_query, max_rows=100, max_bytes=100_000, memory=256)


def test_sql_query_returns_column_names_column_types_and_plain_python_values(run):
    found = ask(run, "SELECT op, count(*) AS n, max(epoch) / 4 AS x FROM decisions GROUP BY op ORDER BY op")

    assert found.columns == ["op", "n", "x"]
    assert found.types == ["VARCHAR", "BIGINT", "DOUBLE"]
    assert found.rows == [["FOSSILIZE", 2, 1.75], ["GERMINATE", 3, 1.5], ["WAIT", 3, 1.0]]
    assert found.note is None


def test_sql_values_without_json_equivalent_are_returned_as_text(run):
    query = "SELECT DATE '2030-01-02', (1::HUGEINT << 70), 'inf'::DOUBLE, [1, NULL], MAP {1: 2}, NULL"

    assert ask(run, query).rows == [["2030-01-02", str(2**70), "inf", [1, None], {"1": 2}, None]]


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("SELECT * FROM read_text('/etc/passwd')", "the query cannot be answered: "),
        ("SELECT * FROM '/etc/passwd'", "the query cannot be answered: "),
        ("SELECT * FROM read_csv('{run}/telemetry/../../secret.csv')", "the query cannot be answered: "),
        ("SELECT * FROM read_json('{run}/config.json')", "the query cannot be answered: "),
        ("SELECT * FROM read_csv('http://localhost:1/x.csv')", "the query cannot be answered: "),
        ("SELECT getenv('HOME')", "the query cannot be answered: "),
        ("SELECT speed FROM epoch", "the query cannot be answered: Binder Error"),
        ("SELEC 1", "the query is not SQL: Parser Error: "),
        ("COPY epoch TO '{run}/telemetry/out.csv'", "a run is read and never changed"),
        ("ATTACH '{run}/out.duckdb'", "a run is read and never changed"),
        ("LOAD httpfs", "a run is read and never changed"),
        ("SET enable_external_access = true", "a run is read and never changed"),
        ("INSERT INTO epoch VALUES (1)", "a run is read and never changed"),
        ("EXPLAIN ANALYZE COPY epoch TO 'epochs.csv'", "a run is read and never changed: .* found EXPLAIN"),
    ],
)
def test_sql_query_that_writes_or_reads_files_outside_the_run_is_refused(run, query, sentence):
    before = sorted(run.parent.rglob("*"))
    with pytest.raises(QueryError, match=sentence) as error:
        ask(run, query.format(run=run))
    assert "\n" not in str(error.value)
    assert sorted(run.parent.rglob("*")) == before


def test_sql_result_above_the_row_limit_is_truncated_with_a_note(run):
    found = ask(run, "SELECT * FROM range(1000000000000)", max_rows=3)

    assert (found.rows, found.note) == ([[0], [1], [2]], "only the first 3 rows are shown")
    assert ask(run, "SELECT * FROM range(3)", max_rows=3).note is None


def test_sql_result_above_the_byte_limit_is_refused(run):
    """The JSON row ["xxxxxxxxxx"] of a query result has 14 bytes, so 98 bytes suffice for seven rows."""
    query = "SELECT repeat('x', 10) FROM range({})"

    assert len(ask(run, query.format(7), max_bytes=98).rows) == 7
    assert len(ask(run, query.format(8), max_bytes=98, max_rows=7).rows) == 7
    with pytest.raises(QueryError, match=r"the answer is larger than 9.8e-05 MB; add a LIMIT, name fewer"):
        ask(run, query.format(8), max_bytes=98)


def test_sql_query_above_the_memory_limit_is_refused(run):
    with pytest.raises(QueryError, match="the query needs more than 128 MB of memory; ask for less"):
        ask(run, "SELECT list(range) FROM range(100000000)", memory=128)
