"""``esper bench [NAME …]``: run the benchmarks of a source checkout and compare the measured values with
their limits."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

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
    sys.path.insert(0, str(ROOT))  # The package ``benchmarks`` is not installed with Esper.
    if not import_module(f"{_SUITE}.timing").run(files, as_json=config.as_json):
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
