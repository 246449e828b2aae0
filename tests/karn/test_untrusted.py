import os
from pathlib import Path

import pytest

from esper.karn.answer import Answer, Limits, answer
from esper.karn.run import open_run
from esper.karn.tables import QueryError
from esper.nissa.compaction import Compactor
from esper.nissa.writer import RunWriter
from tests.karn import fake_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "run"
    with RunWriter(directory) as writer:
        writer.emit(fake_run.run_row())
        for row in fake_run.episode():
            writer.emit(row)
    Compactor().compact(directory / "telemetry", last=0)
    (directory.parent / "secret.csv").write_text("key,value\n1,2\n")
    return directory


def ask(run: Path, query: str, **limits: float) -> Answer:
    usual = {"max_rows": 100, "max_bytes": 100_000, "seconds": 20.0, "memory": 256}
    return open_run(run).untrusted(query, **{**usual, **limits})  # type: ignore[arg-type]


def test_a_question_is_answered_with_names_types_and_plain_values(run):
    found = ask(run, "SELECT op, count(*) AS n, max(epoch) / 4 AS x FROM decisions GROUP BY op ORDER BY op")

    assert found.columns == ["op", "n", "x"]
    assert found.types == ["VARCHAR", "BIGINT", "DOUBLE"]
    assert found.rows == [["FOSSILIZE", 2, 1.75], ["GERMINATE", 3, 1.5], ["WAIT", 3, 1.0]]
    assert found.note is None


def test_lines_and_parquet_are_both_there(run):
    assert ask(run, "SELECT (SELECT count(*) FROM epoch), (SELECT count(*) FROM seed)").rows == [[9, 13]]


def test_values_that_json_does_not_know_become_text(run):
    query = "SELECT DATE '2030-01-02', (1::HUGEINT << 70), 'inf'::DOUBLE, [1, NULL], MAP {1: 2}, NULL"

    assert ask(run, query).rows == [["2030-01-02", str(2**70), "inf", [1, None], {"1": 2}, None]]


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM read_blob('/proc/self/environ')",
        "SELECT * FROM glob('/etc/*')",
        "SELECT * FROM sniff_csv('/etc/passwd')",
        "SELECT * FROM read_csv('{parent}/secret.csv')",
        "SELECT * FROM read_csv('{run}/telemetry/../../secret.csv')",
        "SELECT * FROM read_json('{run}/config.json')",
        "SELECT * FROM read_csv('http://localhost:1/x.csv')",
        "SELECT * FROM read_parquet('s3://bucket/x.parquet')",
        "SELECT getenv('HOME')",
        "SELECT * FROM query('COPY epoch TO ''{parent}/out.csv''')",
    ],
)
def test_no_other_file_is_read(run, query):
    (run / "config.json").write_text("{}")
    with pytest.raises(QueryError, match="the query cannot be answered: "):
        answer(run, query.format(run=run, parent=run.parent), Limits(), on_timeout=lambda: None)


@pytest.mark.parametrize(
    "query",
    [
        "COPY epoch TO '{parent}/out.csv'",
        "COPY epoch TO '{run}/telemetry/out.csv'",
        "EXPORT DATABASE '{parent}/out'",
        "ATTACH '{parent}/out.duckdb'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "PRAGMA database_list",
        "CALL pragma_version()",
        "SET enable_external_access = true",
        "RESET lock_configuration",
        "CREATE TABLE mine (a INT)",
        "INSERT INTO epoch VALUES (1)",
        "EXPLAIN ANALYZE COPY epoch TO '{parent}/out.csv'",
        "USE memory",
        "BEGIN",
    ],
)
def test_nothing_but_reading_is_allowed_and_nothing_is_written(run, query):
    before = sorted(run.parent.rglob("*"))
    with pytest.raises(QueryError, match="a run is read and never changed"):
        answer(run, query.format(run=run, parent=run.parent), Limits(), on_timeout=lambda: None)
    assert sorted(run.parent.rglob("*")) == before


def test_the_process_of_a_query_refuses_the_same(run):
    with pytest.raises(QueryError, match="a run is read and never changed"):
        ask(run, f"COPY epoch TO '{run.parent}/out.csv'")
    with pytest.raises(QueryError, match='Cannot access file "/etc/passwd"'):
        ask(run, "SELECT * FROM read_csv('/etc/passwd')")


def test_mistakes_are_sentences(run):
    with pytest.raises(QueryError, match="the query is not SQL: Parser Error: "):
        ask(run, "SELEC 1")
    with pytest.raises(QueryError, match=r'cannot be answered: Binder Error: .*"speed"') as error:
        ask(run, "SELECT speed FROM epoch")
    assert "\n" not in str(error.value)


def test_an_answer_of_too_many_rows_is_cut_with_a_note(run):
    found = ask(run, "SELECT * FROM range(1000000000000)", max_rows=3)

    assert found.rows == [[0], [1], [2]]
    assert found.note == "only the first 3 rows are shown"


def test_an_answer_of_exactly_as_many_rows_is_whole(run):
    assert ask(run, "SELECT * FROM range(3)", max_rows=3).note is None


def test_an_answer_of_too_many_bytes_is_refused(run):
    """A row is ["xxxxxxxxxx"]: 14 bytes; 98 bytes hold seven."""
    query = "SELECT repeat('x', 10) FROM range({})"

    assert len(ask(run, query.format(7), max_bytes=98).rows) == 7
    with pytest.raises(QueryError, match=r"the answer is larger than 9.8e-05 MB; add a LIMIT, name fewer"):
        ask(run, query.format(8), max_bytes=98)


def test_rows_that_are_left_out_do_not_count_as_bytes(run):
    found = ask(run, "SELECT repeat('x', 10) FROM range(8)", max_bytes=98, max_rows=7)

    assert len(found.rows) == 7
    assert found.note == "only the first 7 rows are shown"


@pytest.mark.parametrize(
    "query",
    [
        "WITH RECURSIVE a AS (SELECT 1 AS x UNION ALL SELECT x + 1 FROM a) SELECT count(*) FROM a",
        "SELECT regexp_matches(repeat('a', 100000000), '(a*)*b')",
    ],
)
def test_a_query_that_takes_too_long_is_ended(run, query):
    with pytest.raises(QueryError, match=r"the query took longer than 0\.5 s; ask for less"):
        ask(run, query, seconds=0.5)


@pytest.mark.parametrize(
    "query",
    [
        "SELECT list(range) FROM range(100000000)",
        "SELECT repeat('x', 1000000000)",
        "SELECT range(1000000000)",
        "SELECT string_agg(repeat('abc', 1000) || range, '') FROM range(10000000)",
    ],
)
def test_a_query_that_takes_too_much_memory_is_ended(run, query):
    """The last three take memory that the database does not count."""
    with pytest.raises(QueryError, match="the query needs more than 128 MB of memory; ask for less"):
        ask(run, query, memory=128)


def test_a_directory_with_modules_of_its_own_does_not_reach_into_the_answer(run, tmp_path, monkeypatch):
    (tmp_path / "msgspec.py").write_text("raise RuntimeError('not mine')")
    monkeypatch.chdir(tmp_path)

    assert ask(run, "SELECT 1").rows == [[1]]


def test_names_of_python_are_no_tables(run):
    secret = [os.getpid()]
    with pytest.raises(QueryError, match="Catalog Error: Table with name secret does not exist"):
        ask(run, "SELECT * FROM secret")
    assert secret
