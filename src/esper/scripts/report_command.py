"""``esper report RUN``: results of a run in one HTML file."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from esper.karn.report import render_report
from esper.karn.run import open_run
from esper.leyline import EsperError, RunRow
from esper.run.run_config import RunConfig, Settings
from esper.scripts.flags import parse_words
from esper.simic.config import TrainingConfig

FILE_NAME = "report.html"
_NO_SETTING = ("out", "as_json")
"""Settings of output, which the reproduction command leaves out because they do not change results."""
_ALWAYS = ("task", "controller", "rng_seed")
"""Settings that the reproduction command lists even if they have their default."""


class ReportConfig(Settings):
    """Show what a run came to, in one HTML file that needs nothing else."""

    against: tuple[Path, ...] = Field((), description="Directories of runs to compare with.")
    out: Path | None = Field(None, description=f"File to write; else {FILE_NAME} in the run's directory.")


def report_command(args: Sequence[str]) -> None:
    needed = "the directory of a run as its first word, such as runs/mine"
    words, config = parse_words(ReportConfig, "esper report RUN", args, needed=needed)
    run = open_run(words[0])
    page = render_report(run, [open_run(path) for path in config.against], reproduction(run.row))
    out = config.out or Path(words[0]) / FILE_NAME
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        reason = f"{error.strerror}; choose another file with --out"
        raise EsperError(f"'{out}' cannot be written: {reason}") from None
    print(f"report saved in {out}")


def reproduction(row: RunRow) -> str | None:
    """Return the command that repeats a run in a new directory; None if the run was not started by a
    command.
    """
    if "task" not in row.config:
        return None
    kind: type[BaseModel] = RunConfig if row.iterations is None else TrainingConfig
    words = ["esper", "run" if row.iterations is None else "train"]
    defaults = kind.model_construct().model_dump(mode="json")
    for name, value in row.config.items():
        if name in _ALWAYS or (name not in _NO_SETTING and value != defaults.get(name)):
            words += _flag(name, value)
    return shlex.join(words)


def _flag(name: str, value: Any) -> list[str]:
    dashed = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{dashed}" if value else f"--no-{dashed}"]
    return [f"--{dashed}", *(map(str, value) if isinstance(value, list) else [str(value)])]
