"""Generators of invalid command lines and of damaged run directories."""

import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_origin

from pydantic import BaseModel

from esper.run.run_config import RunConfig, TrainingConfig
from esper.scripts.eval_command import EvaluationConfig
from esper.scripts.export_command import ExportConfig
from esper.scripts.report_command import ReportConfig
from esper.scripts.runs_command import RunsConfig
from esper.scripts.serve_command import ServeConfig
from esper.scripts.sql_command import SqlConfig
from esper.scripts.study_command import StudyFlags
from esper.scripts.train_command import TrainFlags
from esper.scripts.watch_command import WatchConfig

DIGITS = "9" * 5_000
DEEP = "[" * 1_000 + "]" * 1_000
NO_TEXT = ("a\udc80", "a\0b")
"""Command-line arguments with an undecodable byte and with a zero byte."""
NO_PATHS = ("x" * 5_000, "/dev/null/x", "/proc/self/nowhere/x", "nowhere/[/b]")
"""Unusable paths: too long, below a file, without write permission, with markup of the package rich."""
NO_NUMBERS = (DIGITS, "nan", "-inf", "1e999", "-1", "", "[/b]", "0x10", "1" * 400, DEEP)


class Command(NamedTuple):
    """Command of ``esper`` with valid arguments, to which a test adds an invalid flag."""

    config: type[BaseModel]
    words: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()


COMMANDS = {
    "run": Command(RunConfig, ("--task", "tiny")),
    "train": Command(TrainingConfig, ("--task", "tiny"), tuple(TrainFlags.model_fields)),
    "eval": Command(EvaluationConfig, ("{runs}/trained/best",)),
    "watch": Command(WatchConfig, ("{runs}/grown",)),
    "report": Command(ReportConfig, ("{runs}/grown",)),
    "runs": Command(RunsConfig, ("{runs}",)),
    "sql": Command(SqlConfig, ("{runs}/grown", "select 1")),
    "export": Command(ExportConfig, ("{runs}/grown",)),
    "serve": Command(ServeConfig, ("{runs}",)),
    "study": Command(StudyFlags, ("{runs}/nowhere.toml",)),
}
READERS = (
    ("report", "{run}", "--out", "{run}/report.html"),
    ("runs", "{run}/.."),
    ("sql", "{run}", "select * from epoch"),
    ("sql", "{run}", "select * from decisions", "--json"),
    ("export", "{run}", "--out", "{run}/export"),
    ("watch", "{run}", "--env", "0"),
    ("train", "--resume", "{run}"),
    ("eval", "{run}/best", "--episodes", "1"),
)
"""Commands that read a run; ``--episodes 1`` is invalid for ``eval``, so that no evaluation starts."""


def refused(rng: random.Random, runs: Path) -> list[str]:
    """Return a random command line that ``esper`` must refuse."""
    name = rng.choice(sorted(COMMANDS))
    command = COMMANDS[name]
    words = [name, *(word.format(runs=runs) for word in command.words)]
    flags: dict[str, Any] = {flag: field.annotation for flag, field in command.config.model_fields.items()}
    flags |= {flag: TrainFlags.model_fields[flag].annotation for flag in command.extra}
    flag = rng.choice(sorted(flags))
    how = rng.random()
    # Add an unknown or incomplete flag to the command.
    if how < 0.1:
        odd = ("--" + "y" * rng.randrange(1, 9), f"--{flag}-", "-q", "--=", f"--{DIGITS}")
        return [*words, rng.choice(odd)]
    if how < 0.2:
        return [*words, f"--{flag.replace('_', '-')}", rng.choice(NO_TEXT)]
    # Replace the positional argument of the command by an unusable path.
    if how < 0.3 and name not in ("run", "train"):
        return [name, rng.choice(NO_PATHS), *words[2:]]
    spelled = flag.removeprefix("as_").replace("_", "-")
    return [*words, f"--{spelled}", *_no_value(rng, flag, flags[flag])]


def _no_value(rng: random.Random, flag: str, kind: Any) -> list[str]:
    """Return an invalid value for a flag of the given type."""
    text = str(kind)
    if kind is bool:
        return [rng.choice(("maybe", "[/b]", DIGITS))]
    if "int" in text or "float" in text or get_origin(kind) is Literal:
        return [rng.choice(NO_NUMBERS)]
    if flag in ("out", "config", "resume", "checkpoint", "against") or "Path" in text:
        return [rng.choice(NO_PATHS[:3] if flag == "out" else NO_PATHS)]
    if flag == "host":
        return ["[/b]"]
    return [rng.choice(("[/b]", "x" * 5_000, "a\nb", DEEP)), *rng.choice(((), ("--steps", "-1")))]


# --- damage ---------------------------------------------------------------------------------------


def damaged(rng: random.Random, run: Path, folder: Path) -> Path:
    """Return a copy of a run in which one file is damaged at random."""
    copy = folder / "run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run, copy)
    files = sorted(path for path in copy.rglob("*") if path.is_file() and path.suffix != ".lock")
    path = rng.choice([path for path in files if path.stat().st_size])
    rng.choice((flip, cut, empty, remove, nest, exchange, exchange))(rng, path)
    return copy


def flip(rng: random.Random, path: Path) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.randrange(1, 6)):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(bytes(content))


def cut(rng: random.Random, path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content))])


def empty(rng: random.Random, path: Path) -> None:
    path.write_bytes(b"")


def remove(rng: random.Random, path: Path) -> None:
    path.unlink()


def nest(rng: random.Random, path: Path) -> None:
    exchange(rng, path, DEEP.encode())


STRANGE = (DIGITS.encode(), b"1e308", b"-1", b"null", b'"[/b]"', b'"\xff\xfe"', b'"\\ud800"', b"{}", b"1e999")


def exchange(rng: random.Random, path: Path, value: bytes | None = None) -> None:
    """Replace the value of a random key of a JSON file by an unusual but valid JSON value."""
    content = path.read_bytes()
    values = list(re.finditer(rb'(?<=":)\s*(-?[\d.e+-]+|"[^"]*"|null|true|false)', content))
    if not values:
        return flip(rng, path)
    found = rng.choice(values)
    path.write_bytes(content[: found.start()] + (value or rng.choice(STRANGE)) + content[found.end() :])
    return None


def readings(rng: random.Random, run: Path) -> Iterator[list[str]]:
    """Yield two random commands of ``esper`` that read the run."""
    for words in rng.sample(READERS, 2):
        yield [word.format(run=run) for word in words]
