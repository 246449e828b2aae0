"""Commands with invalid input end with a one-sentence error and a non-zero exit code, without traceback."""

import random
import re
import shutil
import sys
from itertools import product
from pathlib import Path

import pytest

from esper.run.policy_training import train
from esper.scripts import cli
from esper.scripts.guard import INTERNAL_ERROR, INTERRUPTED, USAGE_ERROR, exit_on_error
from tests.integration import hostile
from tests.integration.damage import DEEP, DIGITS
from tests.integration.training import tiny

REFUSED = 450
"""Number of random invalid commands."""


@pytest.fixture(scope="module")
def runs(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train(tiny(iterations=2, detail="full"), folder / "trained")
    cli.main(["run", "--task", "tiny", "--steps", "4", "--out", str(folder / "grown"), "--json"])
    return folder


@pytest.fixture
def ending(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs a command in a new folder and returns its exit code and output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def call(*words: str) -> tuple[object, str]:
        code: object = 0
        try:
            cli.main(words)
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err, words
        if code == USAGE_ERROR:
            assert re.fullmatch(r"esper: [^\n]+\n", err), words
        return code, out + err

    return call


TAKES_A_PATH = (
    *("report {}", "watch {}", "sql {} 1", "eval {}", "export {}", "runs {}"),
    *("study {}.toml", "train --config {}.json", "train --resume {}", "run --controller ppo --checkpoint {}"),
)
KINDS = [
    *([*command.format(path).split()] for command, path in product(TAKES_A_PATH, hostile.NO_PATHS)),
    *(["run", "--steps", "1", "--out", f"{path}/x"] for path in hostile.NO_PATHS[:3]),
    *(
        ["run", flag, value]
        for flag, value in product(("--rng-seed", "--steps", "--incubation-epochs"), hostile.NO_NUMBERS)
    ),
    *(["serve", "{runs}", "--host", host] for host in ("é" * 80, "x" * 300, "[/b]", "")),
]
"""Command lines with an invalid path, number or host name."""


@pytest.mark.parametrize("words", KINDS, ids=lambda words: " ".join(words)[:40])
def test_command_with_an_invalid_path_number_or_host_name_ends_with_a_one_sentence_error(
    words: list[str], ending, runs: Path
) -> None:
    code, said = ending(*(str(runs) if word == "{runs}" else word for word in words))
    assert code == USAGE_ERROR, said


def test_rich_markup_in_the_name_of_a_run_is_printed_as_text(ending, runs: Path, tmp_path: Path) -> None:
    out = "[/b] [bold]"
    code, said = ending("run", "--task", "tiny", "--steps", "1", "--out", out)
    assert (code, "run saved in [/b] [bold]" in said) == (0, True)
    for words in (("watch", out), ("runs", "."), ("export", out)):
        code, said = ending(*words)
        assert (code, "[/b] [bold]" in said) == (0, True), words


def test_terminal_escapes_in_names_of_runs_and_sql_values_are_printed_as_text(
    ending, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = "\x1b]0;title\x07\x1b[31m"
    shutil.copytree(runs / "grown", out)
    query = "select chr(27) || '[2J' as x"
    for words in (
        *(("runs", "."), ("watch", out), ("report", out), ("export", out)),
        *(("sql", out, query), ("sql", out, query, "--json"), ("sql", out, query, "--csv")),
    ):
        if "--csv" in words:  # CSV for a file or another program contains the values unchanged.
            monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        code, said = ending(*words)
        assert code == 0, words
        assert "\x1b]0" not in said, words
        assert "\x1b[" not in said, words


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("deep.json", '{"envs": ' + DEEP + "}"),
        ("deep.toml", "envs = " + DEEP),
        ("digits.json", '{"envs": ' + DIGITS + "}"),
        ("digits.toml", "envs = 0x" + "f" * 6_000),
        ("list.json", '{"envs": [' + "1," * 400_000 + "1]}"),
        ("list.toml", "hold_heads = [" + "1," * 10_000 + "]"),
        ("half.json", '{"task": "\\ud800"}'),
        ("bytes.json", "\udcff\udcfe{}"),
        ("markup.json", '{"[/b]": 1}'),
    ],
)
def test_train_refuses_a_malformed_configuration_file(
    name: str, content: str, ending, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    assert ending("train", "--config", name)[0] == USAGE_ERROR


@pytest.mark.parametrize("word", hostile.NO_TEXT)
@pytest.mark.parametrize(
    "words", [(), ("run", "--task"), ("sql", "{runs}/grown"), ("serve", "{runs}", "--host")]
)
def test_undecodable_bytes_on_the_command_line_are_refused(
    words: tuple[str, ...], word: str, ending, runs: Path
) -> None:
    code, said = ending(*(w.format(runs=runs) for w in words), word)
    assert code == USAGE_ERROR
    assert "is not valid UTF-8" in said


@pytest.mark.parametrize(
    ("column", "value"), [("t", "1e308"), ("started", '"never"'), ("name", '"[/b]"'), ("horizon", DEEP)]
)
def test_commands_on_a_run_with_an_invalid_column_value_succeed_or_end_with_a_one_sentence_error(
    column: str, value: str, ending, runs: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "grown", run)
    rows = run / "telemetry" / "rows-00000.jsonl"
    pattern = rf'"{column}":("[^"]*"|[^,}}]+)'
    found = re.subn(pattern, lambda _: f'"{column}":{value}', rows.read_text(), count=1)
    assert found[1] == 1
    rows.write_text(found[0])
    for words in hostile.READERS[:-2]:
        assert ending(*(word.format(run=run) for word in words))[0] in (0, USAGE_ERROR), words


def test_sql_command_prints_timestamps_with_their_time_zone(ending, runs: Path) -> None:
    query = "select timestamptz '2020-01-01 00:00:00+00' as x, [timestamptz '2020-01-01 00:00:00+00'] as y"
    code, said = ending("sql", str(runs / "grown"), query, "--csv")
    assert (code, said.count("2020-01-01 00:00:00+00:00")) == (0, 2)


# --- random input ---------------------------------------------------------------------------------


def test_random_invalid_commands_end_with_a_one_sentence_error(ending, runs: Path) -> None:
    rng = random.Random(13)
    for _ in range(REFUSED):
        words = hostile.refused(rng, runs)
        code, said = ending(*words)
        assert code == USAGE_ERROR, (words, said)


# --- other errors ---------------------------------------------------------------------------------


def test_an_unexpected_error_writes_its_traceback_to_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def fail() -> None:
        raise KeyError("never\nthought of")

    with pytest.raises(SystemExit) as stop:
        exit_on_error(fail)
    assert stop.value.code == INTERNAL_ERROR
    (file,) = tmp_path.glob("esper-*.log")
    said = capsys.readouterr().err
    assert said.startswith("esper: KeyError: ")
    assert said.endswith(f"the traceback is in {file}\n")
    assert said.count("\n") == 1
    assert "in fail" in file.read_text()


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        # Commands that write no files print this message after Ctrl-C.
        (KeyboardInterrupt(), INTERRUPTED, "esper: interrupted before the command was done\n"),
        # DuckDB raises this error after Ctrl-C during a query.
        (RuntimeError("Query interrupted"), INTERRUPTED, "esper: interrupted before the command was done\n"),
        (SystemExit(3), 3, ""),
    ],
)
def test_command_that_exits_or_is_interrupted_ends_with_the_expected_exit_code_and_message(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        exit_on_error(stop)
    assert ended.value.code == code
    assert capsys.readouterr().err == said
