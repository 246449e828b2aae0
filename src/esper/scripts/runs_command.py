"""``esper runs [DIR]``: list of all runs below a folder with their state and score."""

import json
from collections.abc import Sequence
from pathlib import Path

from esper.karn import runs
from esper.leyline import printable
from esper.run.run_config import Settings
from esper.scripts.flags import parse_words


class RunsConfig(Settings):
    """List the runs below a folder; the default folder is runs/."""

    as_json: bool = False
    """Print the list as JSON."""


def runs_command(args: Sequence[str]) -> None:
    words, config = parse_words(RunsConfig, "esper runs [DIR]", args)
    folder = Path(*words or ["runs"])
    paths = list(runs.find_runs(folder))
    found = map(runs.listed, paths)
    if config.as_json:
        print(json.dumps([runs.as_json(run) for run in found], indent=1))
    elif paths:
        width = max(len(printable(str(path))) for path in paths)
        for line in runs.list_lines(found, width):
            print(line, flush=True)
    else:
        print(printable(f"there are no runs in '{folder}'"))
