"""``esper bench [NAME …]``: run the benchmarks of a source checkout and compare the measured values with
their limits."""

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import esper
from esper.leyline import EsperError, UnknownNameError
from esper.run.run_config import Settings
from esper.scripts.flags import parse_words

ROOT = Path(esper.__file__).parents[2]
_SUITE = "benchmarks"


class BenchConfig(Settings):
    """Measure the cost of Esper's components, each relative to a reference in the same process, on one
    thread."""

    as_json: bool = False
    """Print the measurements as JSON, and nothing else."""


def bench_command(args: Sequence[str]) -> None:
    """Run the benchmarks that are named on the command line, such as environment_step, or all benchmarks."""
    words, config = parse_words(BenchConfig, "esper bench [NAME …]", args, count=len(args))
    files = _files(words)
    failed = _run(files, quiet=config.as_json)
    timing: Any = import_module(f"{_SUITE}.timing")
    figures = [figure._asdict() for figure in timing.FIGURES]
    if config.as_json:
        print(json.dumps(figures, indent=1))
    else:
        _print_table(figures)
    if failed:
        raise SystemExit(1)


def _files(names: Sequence[str]) -> list[Path]:
    folder = ROOT / _SUITE
    if not folder.is_dir() or find_spec("pytest") is None:
        raise EsperError(
            "esper bench needs a source checkout with its development tools: clone the repository, and there"
            ' run pip install -e ".[dev]"'
        )
    found = {path.stem.removeprefix("bench_"): path for path in sorted(folder.glob("bench_*.py"))}
    for name in names:
        if name not in found:
            raise UnknownNameError("benchmark", name, found)
    return [found[name] for name in names or found]


def _run(files: Sequence[Path], *, quiet: bool) -> bool:
    """Run the benchmark files by pytest and return whether a benchmark failed."""
    import pytest

    sys.path.insert(0, str(ROOT))  # The package ``benchmarks`` is not installed with Esper.
    selected = ["-o", "python_files=bench_*.py", "-o", "python_functions=bench_*"]
    plain = ["-p", "no:xdist", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    shown = ["--capture=no", "--no-header", "--tb=line", "--quiet"]
    with redirect_stdout(StringIO()) if quiet else nullcontext():
        return bool(pytest.main([*map(str, files), *shown, *selected, *plain]))


def _print_table(figures: Sequence[dict[str, Any]]) -> None:
    table = Table("figure", "value", "", "limit", "")
    for row in figures:
        held = {True: "holds", False: "NOT HELD", None: ""}[row["holds"]]
        table.add_row(row["title"], f"{row['value']:.3g}", row["unit"], row["limit"] or "", held)
    Console().print(table)
