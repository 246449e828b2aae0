"""Parsing of command-line flags, and commands whose standard output is closed early."""

import subprocess
import sys
from pathlib import Path

import pytest

from esper.nissa.writer import RunWriter
from esper.run.run_config import ConfigError, TrainingConfig
from esper.scripts.cli import COMMANDS
from esper.scripts.flags import parse_flags
from esper.scripts.guard import USAGE_ERROR
from tests.karn import fake_run

HELP = """
import sys, time
from esper.scripts.cli import main
try:
    main([sys.argv[1], "--help"])
except SystemExit as end:
    assert not end.code
print("\\n", time.process_time(), *sorted({"torch"} & sys.modules.keys()))
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_is_fast_and_does_not_import_torch(command: str) -> None:
    words = [sys.executable, "-c", HELP, command]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    assert command in said[0]
    seconds, *heavy = said[-1].split()
    assert heavy == []
    assert float(seconds) < 1.5, "CPU seconds; usually 0.25"


@pytest.mark.parametrize(
    ("args", "given"),
    [
        ([], {}),
        (["--rent", "0.01"], {"rent": 0.01}),
        (["--rent=0.5", "--envs", "32"], {"rent": 0.5, "envs": 32}),
        (["--conditioned"], {"conditioned": True}),
        (["--no-conditioned"], {"conditioned": False}),
        (["--hold-heads", "tempo", "style"], {"hold_heads": ("tempo", "style")}),
    ],
)
def test_parsed_flags_contain_exactly_the_given_flags_even_if_a_value_equals_the_default(
    args: list[str], given: dict
) -> None:
    assert parse_flags(TrainingConfig.model_fields, "esper train", "", args) == given


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--rnet", "1"], "unknown flag '--rnet'; did you mean --rent?"),
        (["--quite-other"], "unknown flag '--quite-other'; esper train --help lists them"),
        (["--rent"], "--rent: expected one argument; esper train --help lists the flags"),
        (["more"], "unexpected word 'more'; esper train --help lists the flags"),
    ],
)
def test_invalid_command_line_flag_raises_a_one_sentence_error(args: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_flags(TrainingConfig.model_fields, "esper train", "", args)
    assert str(refusal.value) == sentence


def test_command_whose_standard_output_is_closed_ends_without_a_traceback(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as writer:
        writer.emit(fake_run.run_row())
    script = "from esper.scripts.cli import main; main()"
    words = ["sql", str(tmp_path / "run"), "SELECT * FROM range(100000)", "--csv"]
    process = subprocess.Popen(
        [sys.executable, "-c", script, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(timeout=600)
    assert (process.returncode, errors) == (USAGE_ERROR, "")
