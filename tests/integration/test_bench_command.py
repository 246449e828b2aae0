"""``esper bench``: measured values, missed thresholds, unknown benchmarks."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from esper.scripts import bench_command, cli

CHECKOUT = Path(__file__).parents[2]
SUITE = """
from benchmarks.timing import figure

def bench_quick():
    figure("quick", 1.5, "s", at_most=2.0)

def bench_slow():
    figure("slow", 0.5, "× plain", at_least=1.0, note="of 3")
"""
RUN = (
    "from pathlib import Path; from esper.scripts import bench_command, cli; bench_command.ROOT = Path('.');"
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a source checkout with two benchmarks; the value of the second misses its threshold."""
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    shutil.copy(CHECKOUT / "benchmarks" / "timing.py", folder)
    (folder / "bench_mine.py").write_text(SUITE, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("shown", ["--json", "--no-json"])
def test_bench_prints_measured_values_and_exits_with_code_1_if_a_value_misses_its_threshold(
    checkout: Path, shown: str
) -> None:
    command = [sys.executable, "-c", f"{RUN} cli.main(['bench', 'mine', '{shown}'])"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    if shown == "--json":
        columns = ("title", "value", "unit", "limit", "holds", "note")
        assert [[row[column] for column in columns] for row in json.loads(done.stdout)] == [
            ["quick", 1.5, "s", "at most 2", True, ""],
            ["slow", 0.5, "× plain", "at least 1", False, "of 3"],
        ]
    else:
        assert "quick: 1.5 s (at most 2); load" in done.stdout
        assert "NOT HELD" in done.stdout.splitlines()[-2], "the table ends with the second figure"


def test_bench_refuses_an_unknown_benchmark_with_a_list_of_benchmarks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "writr"])
    assert (
        "unknown benchmark 'writr'; did you mean writer? Allowed: counterfactual," in capsys.readouterr().err
    )


def test_bench_is_refused_without_a_source_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_command, "ROOT", tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["bench"])
    assert "esper bench needs a source checkout with its development tools" in capsys.readouterr().err
