import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from esper.nissa.writer import RunWriter
from esper.scripts import cli
from tests.integration.training import sentence_of
from tests.karn import fake_run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with RunWriter(tmp_path / "runs" / "mine") as writer:
        writer.emit(fake_run.run_row())
        for row in fake_run.episode():
            writer.emit(row)
    return tmp_path / "runs" / "mine"


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    cli.main(words)
    return capsys.readouterr().out


@pytest.fixture
def answer(run, capsys):
    """Return a function that runs ``esper sql`` with a query on the run and returns the output."""
    return lambda *words: printed(capsys, "sql", str(run), *words)


def test_sql_command_prints_a_query_result_as_a_table(answer):
    out = answer("SELECT op, count(*) AS n, avg(value) AS v FROM decisions GROUP BY op")

    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["op", "n", "v"]
    assert sorted(lines[2:]) == [["FOSSILIZE", "2", "–"], ["GERMINATE", "3", "–"], ["WAIT", "3", "–"]]


def test_sql_command_prints_a_result_wider_than_the_console_row_by_row(answer, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = answer("SELECT * FROM decision", "--limit", "2")

    assert out.count("── ") == 0
    found = [line.split()[:2] for line in out.splitlines() if line.startswith(("row ", "epoch"))]
    assert found == [["row", "1"], ["epoch", "0"], ["row", "2"], ["epoch", "1"]]
    assert "read           [true, false, false, false, false, false, false, false]" in out


def test_sql_command_prints_text_with_brackets_unchanged(answer):
    assert "[bold]x[/bold]" in answer("SELECT '[bold]x[/bold]' AS \"a[b]\"")


def test_json_output_of_the_sql_command_has_columns_types_and_rows(answer):
    out = answer("SELECT epoch, action FROM decision ORDER BY t", "--json", "--limit", "1")

    assert json.loads(out) == {
        "columns": ["epoch", "action"],
        "types": ["BIGINT", "BIGINT[]"],
        "rows": [[0, [1, 0, 0, 0, 0, 0, 0, 0]]],
        "note": "only the first 1 rows are shown",
    }


def test_csv_output_of_the_sql_command_has_a_header_and_all_rows(answer):
    out = answer("SELECT epoch, value, 'a,b', on_ FROM (SELECT *, [1] AS on_ FROM decision)", "--csv")

    rows = list(csv.reader(io.StringIO(out)))
    assert rows[0] == ["epoch", "value", "'a,b'", "on_"]
    assert rows[1] == ["0", "", "a,b", "[1]"]
    assert len(rows) == 9


def test_sql_command_prints_100_rows_as_a_table_and_all_rows_as_json_or_csv_unless_a_limit_is_given(
    run, answer, capsys
):
    query = "SELECT * FROM range(150)"
    for flags, last in (((), "99"), (("--csv", "--limit", "2"), "1")):
        cli.main(["sql", str(run), query, *flags])
        shown = capsys.readouterr()
        assert shown.out.splitlines()[-1].strip() == last
        number = int(last) + 1
        assert shown.err == f"esper: only the first {number} rows are shown; --limit sets how many\n"

    whole = json.loads(answer(query, "--json"))
    assert whole["rows"] == [[number] for number in range(150)]
    assert whole["note"] is None
    assert answer(query, "--csv").count("\n") == 151


@pytest.mark.parametrize("form", [[], ["--json"], ["--csv"]])
def test_sql_command_refuses_a_query_result_of_a_hundred_megabytes(run, capsys, form):
    query = "SELECT repeat('x', 1000000) FROM range(100)"
    assert sentence_of(capsys, "sql", str(run), query, *form) == (
        "esper: the answer is larger than 50 MB; add a LIMIT, name fewer columns, or aggregate with count,"
        " avg and GROUP BY\n"
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["RUN"], "esper sql needs a run and a query"),
        ([], "esper sql needs a run and a query"),
        (["nowhere", "SELECT 1"], "there is no run directory 'nowhere'"),
        (["RUN", "DROP VIEW epoch"], "a run is read and never changed"),
        (["RUN", "SELECT * FROM read_csv('/etc/passwd')"], 'Cannot access file "/etc/passwd"'),
        (["RUN", "SELECT 1", "--limit", "0"], "limit"),
        (["RUN", "SELECT 1", "--json", "--csv"], "--json and --csv are two ways to print one answer"),
    ],
)
def test_sql_command_with_invalid_arguments_ends_with_a_one_sentence_error(run, capsys, words, sentence):
    assert sentence in sentence_of(capsys, "sql", *[str(run) if word == "RUN" else word for word in words])


def in_a_process(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    words = (sys.executable, "-c", code, *words)
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)


def test_sql_query_that_exceeds_the_time_limit_ends_with_a_one_sentence_error(run):
    code = "import sys; from esper.scripts import cli, sql_command as command\n"
    code += "command.SECONDS = 0.5; cli.main(sys.argv[1:])"
    query = "WITH RECURSIVE a AS (SELECT 1 AS x UNION ALL SELECT x + 1 FROM a) SELECT count(*) FROM a"
    finished = in_a_process(code, "sql", str(run), query)
    assert finished.returncode == 2
    assert finished.stderr == "esper: the query took longer than 0.5 s; ask for less\n"


@pytest.mark.parametrize("command", ["sql", "runs"])
def test_commands_sql_and_runs_do_not_import_torch(run, command):
    words = [str(run), "SELECT 1"] if command == "sql" else [str(run)]
    code = (
        "import sys; from esper.scripts import cli; cli.main(sys.argv[1:]); assert 'torch' not in sys.modules"
    )
    assert in_a_process(code, command, *words).returncode == 0


def test_runs_command_prints_one_line_per_run_and_the_reason_for_a_damaged_run(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    damaged = run.parent / "damaged" / "telemetry"
    damaged.mkdir(parents=True)
    (damaged / "rows-00000.jsonl").write_text('{"table":"run","t":1.0}\n')

    _, first, reason, second = printed(capsys, "runs", str(run.parent)).splitlines()

    assert first.split()[-2:] == ["damaged", "–"]
    assert second.split()[1:] == [
        *("digits_impaired", "heuristic", "0", "61.5", "22.0", "398", "epoch", "8/8", "finished"),
        *("2030-01-01", "00:00"),
    ]
    assert reason.startswith(f"damaged: {damaged / 'rows-00000.jsonl'}, line 1, is not a row of table 'run'")


def test_runs_command_lists_the_folder_runs_by_default(run, capsys, monkeypatch):
    monkeypatch.chdir(run.parents[1])

    (found,) = json.loads(printed(capsys, "runs", "--json"))
    assert (found["path"], found["state"], found["score"]) == ("runs/mine", "finished", 61.5)


def test_runs_command_on_a_folder_without_runs_prints_that_there_are_none(tmp_path, capsys):
    assert printed(capsys, "runs", str(tmp_path)) == f"there are no runs in '{tmp_path}'\n"
    assert "there is no folder" in sentence_of(capsys, "runs", str(tmp_path / "nowhere"))
