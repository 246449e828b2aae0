"""``esper runs [DIR]``: list of all runs below a folder with their state and score."""

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field
from rich.console import Console

from esper.karn import runs
from esper.leyline.errors import EsperError
from esper.run.run_config import Settings
from esper.scripts.flags import parse_words

WIDEST = 100_000
"""Width of the console in columns, so large that no line is cut."""


class RunsConfig(Settings):
    """List the runs below a folder, runs/ unless another one is named."""

    as_json: bool = Field(False, description="Print the list as JSON.")


def runs_command(args: Sequence[str]) -> None:
    words, config = parse_words(RunsConfig, "esper runs [DIR]", args)
    folder = Path(*words or ["runs"])
    if words and not folder.is_dir():
        raise EsperError(f"there is no folder '{folder}'")
    found = [runs.listed(path) for path in runs.find_runs(folder)]
    if config.as_json:
        print(json.dumps([runs.as_json(run) for run in found], indent=1))
    elif found:
        _print_list(found)
    else:
        print(f"there are no runs in '{folder}'")


def _print_list(found: Sequence[runs.ListedRun]) -> None:
    """Print one line per run, then the problems of damaged runs."""
    console = Console(width=WIDEST)
    console.print(runs.table_of(found))
    for run in found:
        if run.problem is not None:
            console.print(f"damaged: {run.problem}", soft_wrap=True, markup=False, highlight=False)
