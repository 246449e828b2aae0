"""Generators of invalid command lines, and of command lines that read a run."""

import random
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
from tests.integration.damage import DEEP, DIGITS

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


def readings(rng: random.Random, run: Path) -> Iterator[list[str]]:
    """Yield two random commands of ``esper`` that read the run."""
    for words in rng.sample(READERS, 2):
        yield [word.format(run=run) for word in words]
