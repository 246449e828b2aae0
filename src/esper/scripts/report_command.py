"""``esper report RUN``: write the results of a run to one HTML file."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from esper.files.atomic_write import SaveError, write_durably
from esper.files.row_files import check_outside_runs
from esper.karn.page.sections import GENERATOR, render_report
from esper.karn.run import open_run
from esper.leyline import EsperError, RunRow, printable
from esper.run.run_config import RunConfig, Settings
from esper.scripts.flags import parse_words
from esper.simic.config import TrainingConfig

FILE_NAME = "report.html"
_NO_SETTING = ("out", "as_json")
"""Settings of the output, which do not change results; the command that repeats a run omits them."""
_ALWAYS = ("task", "controller", "rng_seed")
"""Settings that are always part of the command that repeats a run, even if they have their default value."""


class ReportConfig(Settings):
    """Write the results of a run to one HTML file that needs no other file."""

    against: tuple[Path, ...] = ()
    """Directories of other runs that the report compares this run with."""
    out: Path | None = Field(None, description=f"File to write; else {FILE_NAME} in the run's directory.")


def report_command(args: Sequence[str]) -> None:
    needed = "the directory of a run as its first word, such as runs/mine"
    words, config = parse_words(ReportConfig, "esper report RUN", args, needed=needed)
    run = open_run(words[0])
    out = config.out or Path(words[0]) / FILE_NAME
    _check_replaceable(out)
    page = render_report(run, [open_run(path) for path in config.against], reproduction(run.row))
    try:
        write_durably(out, page.encode())
    except SaveError as error:
        raise SaveError(f"{error}; choose another file with --out") from None
    print(f"report saved in {printable(str(out))}")


def _check_replaceable(out: Path) -> None:
    """Raise ``EsperError`` if the report would replace anything but an empty file or an earlier report."""
    check_outside_runs(out)
    found = "is a link" if out.is_symlink() else "is not a file"
    if not out.is_symlink() and (out.is_file() or not out.exists()):
        content = out.read_bytes() if out.exists() else b""
        if not content or GENERATOR.encode() in content:
            return
        found = "is not a report"
    raise EsperError(f"'{out}' {found}, and is not replaced; move it away, or choose another file with --out")


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
