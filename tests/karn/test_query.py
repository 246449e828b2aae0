from pathlib import Path

import pytest

from esper.karn.run import read_rows
from esper.leyline.errors import EsperError
from esper.leyline.rows import EpochRow, RunRow, SeedRow
from tests.karn import fake_run, made_run


@pytest.fixture
def run(tmp_path) -> Path:
    """Return the directory of a run with the rows of three epochs."""
    made_run.write(tmp_path / "run", map(fake_run.epoch_row, range(3)))
    whole = lines(tmp_path / "run").read_bytes()
    lines(tmp_path / "run").write_bytes(whole[: whole.index(b'{"table":"resource"')])
    return tmp_path / "run"


def lines(run: Path, number: int = 0) -> Path:
    return run / "telemetry" / f"rows-{number:05}.jsonl"


def test_telemetry_rows_are_read_oldest_first_and_a_table_without_rows_is_empty(run):
    assert [row.epoch for row in read_rows(run, EpochRow)] == [0, 1, 2]
    assert read_rows(run, SeedRow) == []


@pytest.mark.parametrize("cut", [1, 2, 40, 200])
def test_incomplete_last_line_of_a_telemetry_file_is_ignored(run, cut):
    # Removing the last byte of the file removes the newline; readers ignore a last line without newline.
    lines(run).write_bytes(lines(run).read_bytes()[:-cut])

    assert [row.epoch for row in read_rows(run, EpochRow)] == [0, 1]


@pytest.mark.parametrize("damaged", [b'{"table":"epoch","t":1.0,"env"', b'{"table":"epoch","t":\xff}'])
def test_error_for_a_malformed_telemetry_line_names_file_and_line(run, damaged):
    first, _, third, _ = lines(run).read_bytes().split(b"\n")
    lines(run).write_bytes(b"\n".join([first, damaged, third, b""]))

    with pytest.raises(EsperError, match=r"rows-00000\.jsonl, line 2, is not a row of table 'epoch'"):
        read_rows(run, EpochRow)


def test_folder_in_place_of_a_json_lines_file_is_an_error(run):
    lines(run, 1).mkdir()

    with pytest.raises(EsperError, match=r"rows-00001\.jsonl' cannot be read: Is a directory"):
        read_rows(run, EpochRow)


def test_null_in_a_required_column_of_a_telemetry_row_is_an_error(run):
    lines(run).write_bytes(lines(run).read_bytes().replace(b'"ms":15.0', b'"ms":null'))

    with pytest.raises(
        EsperError, match=r"line 1, is not a row of table 'epoch': Expected `float`, got `null` - at `\$\.ms`"
    ):
        read_rows(run, EpochRow)


def test_telemetry_files_are_read_in_order_and_each_may_end_with_an_incomplete_line(run):
    whole = lines(run).read_bytes()
    lines(run, 1).write_bytes(whole)
    lines(run).write_bytes(whole[:-5])

    assert [row.epoch for row in read_rows(run, EpochRow)] == [0, 1, 0, 1, 2]


def test_opening_a_directory_that_is_not_a_run_is_refused(tmp_path):
    with pytest.raises(EsperError, match=r"there is no run directory '.*nowhere'"):
        read_rows(tmp_path / "nowhere", EpochRow)
    with pytest.raises(EsperError, match="is not a run's directory: it holds no folder 'telemetry'"):
        read_rows(tmp_path, EpochRow)


@pytest.mark.parametrize("line", [b"{}", b'{"table":"epochs","t":1.0}', b"\xff", b""])
def test_telemetry_line_without_a_table_name_is_an_error(run, line):
    lines(run).write_bytes(lines(run).read_bytes() + line + b"\n")

    with pytest.raises(EsperError, match=r"rows-00000\.jsonl, line 4, is not a row: it must begin with"):
        read_rows(run, EpochRow)


def test_deeply_nested_json_in_a_telemetry_line_is_an_error(run):
    lines(run).write_bytes(b'{"table":"run","config":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n")

    with pytest.raises(EsperError, match="rows-00000"):
        read_rows(run, RunRow)
