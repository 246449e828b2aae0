"""``esper watch RUN``: a run or a training on the terminal, from another process and only by reading."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Final

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console

from esper.config import checked
from esper.karn.questions.progress import progress
from esper.karn.run import Run, open_run
from esper.karn.terminal import TerminalView
from esper.leyline.errors import EsperError
from esper.leyline.events import RunRow
from esper.scripts.flags import parse_flags
from esper.scripts.guard import USAGE_ERROR

DESCRIPTION = "Show a run that is over, or follow one that goes on. Ctrl-C ends watching, never the run."
PROG = "esper watch RUN"
POLL_SECONDS: Final = 0.25
SHARE_OF_TIME: Final = 0.5
"""Of its own time, that watching spends on looking at the files."""


class WatchConfig(BaseModel):
    """What to show of a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    env: int | None = Field(
        None,
        ge=0,
        description="Environment of a training whose last episode is shown; the best episode unless given.",
    )


def watch_command(args: Sequence[str]) -> None:
    """The first word is the run's directory, the rest are flags."""
    if not args or args[0].startswith("-"):
        parse_flags(WatchConfig, PROG, DESCRIPTION, args)
        raise EsperError("esper watch needs a run's directory as its first word, such as runs/mine")
    given, _ = parse_flags(WatchConfig, PROG, DESCRIPTION, args[1:])
    try:
        watch(open_run(args[0]), checked(WatchConfig, given), Console())
    except KeyboardInterrupt:
        return


def watch(run: Run, config: WatchConfig, console: Console) -> None:
    """Show what is recorded, then what comes, until the run is over."""
    if config.env is not None and run.rows(RunRow) and config.env >= run.row.envs:
        raise EsperError(
            f"environment {config.env} is not in this run; it has {run.row.envs}, numbered from 0"
        )
    with TerminalView(run.path, console, env=config.env, share_of_time=SHARE_OF_TIME) as view:
        view.refresh()
        while view.error is None and run.state == "running":
            time.sleep(POLL_SECONDS)
            view.refresh()
    if view.error is not None:
        sys.exit(USAGE_ERROR)  # the view has said why
    said = f"the run in {run.path} has {run.state} {_place(run)}"
    console.print(said, soft_wrap=True, highlight=False, markup=False)


def _place(run: Run) -> str:
    """How far it came."""
    if not run.rows(RunRow):
        return "before it recorded anything"
    found = progress(run)
    return f"after {found.unit} {found.done} of {found.total or 'an unknown number'}"
