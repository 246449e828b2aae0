"""``esper watch RUN``: terminal view of a run that another process writes; the command writes no files."""

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from pydantic import Field
from rich.console import Console

from esper.karn.run import Run, open_run
from esper.karn.runs import progress
from esper.karn.terminal import TerminalView
from esper.leyline import EsperError, RunRow, printable
from esper.run.run_config import Settings
from esper.scripts.flags import parse_words
from esper.scripts.guard import USAGE_ERROR

POLL_SECONDS: Final = 0.25
SHARE_OF_TIME: Final = 0.5
"""Largest share of wall-clock time that ``esper watch`` spends on reading files."""


class WatchConfig(Settings):
    """Show a finished run in the terminal, or follow a running one. Ctrl-C ends ``esper watch`` and does not
    stop the run."""

    env: int | None = Field(None, ge=0)
    """Number of the environment whose last episode is shown; unless given, the best episode."""


def watch_command(args: Sequence[str]) -> None:
    needed = "a run's directory as its first word, such as runs/mine"
    words, config = parse_words(WatchConfig, "esper watch RUN", args, needed=needed)
    with suppress(KeyboardInterrupt):
        watch(open_run(words[0]), config, Console())


def watch(run: Run, config: WatchConfig, console: Console) -> None:
    """Show the rows that a run has written, then new rows until the run has ended."""
    if config.env is not None and run.rows(RunRow) and config.env >= run.row.envs:
        known = f"it has {run.row.envs}, numbered from 0"
        raise EsperError(f"environment {config.env} is not in this run; {known}")
    with TerminalView(run.path, console, env=config.env, share_of_time=SHARE_OF_TIME) as view:
        view.refresh()
        while view.error is None and run.state == "running":
            time.sleep(POLL_SECONDS)
            view.refresh()
    if view.error is not None:
        sys.exit(USAGE_ERROR)  # The terminal view has already printed the error message.
    said = f"the run in {run.path} has {run.state} {_place(run)}"
    console.print(printable(said), soft_wrap=True, highlight=False, markup=False)


def _place(run: Run) -> str:
    """Return the progress of the run as text, such as "after epoch 3 of 20"."""
    if not run.rows(RunRow):
        return "before it recorded anything"
    found = progress(run)
    return f"after {found.unit} {found.done} of {found.total or 'an unknown number'}"
