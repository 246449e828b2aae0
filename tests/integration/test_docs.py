"""Markdown documents: commands and code run, links have targets, quoted tables equal the experiments."""

import os
import re
import runpy
import shlex
import sys
import warnings
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

import pytest

from esper.scripts import cli
from tests.integration.training import forked

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SECONDS = 1200
"""Timeout in seconds for one document or example program; the slowest takes 30 seconds on an idle machine."""

OTHERS = r"(lightning|transformers)\b"
"""Packages whose warnings are ignored when examples run."""

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_NOT_HERE = re.compile(r"^(make\b|\. \.venv/bin/activate)")
"""Commands in documents that set up a Python environment and are skipped by the tests."""


def name(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


def blocks(document: Path, language: str) -> list[str]:
    return [text for found, text in _BLOCK.findall(document.read_text(encoding="utf-8")) if found == language]


def logical_lines(block: str) -> list[str]:
    """Return the shell commands of a code block, with continuation lines joined."""
    lines = block.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#") and not _NOT_HERE.match(line)]


def run_command(command: str) -> None:
    """Run one shell command of a document in this process."""
    words, out = shlex.split(command), None
    if ">" in words:
        words, out = words[: words.index(">")], words[words.index(">") + 1]
    with redirect_stdout(Path(out).open("w")) if out else nullcontext():
        if words[0] == "esper":
            cli.main(words[1:])
        else:
            assert words[:2] == ["python", "-m"], f"not a command of ours: {command}"
            sys.argv = words[2:]
            runpy.run_module(words[2], run_name="__main__")


def run_here(folder: Path, commands: list[str], program: Path | None) -> None:
    """Run shell commands and then a Python program in this child process, with warnings as errors."""
    os.chdir(folder)
    said = os.open("said", os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(said, number)
    warnings.simplefilter("error")
    warnings.filterwarnings("default", module=OTHERS)
    for command in commands:
        run_command(command)
    if program:
        runpy.run_path(str(program), run_name="__main__")


def run(folder: Path, commands: list[str], program: Path | None) -> None:
    """Run shell commands and a Python program in a child process; print their output if they fail."""
    child = forked(run_here, folder, commands, program)
    child.join(SECONDS)
    assert child.exitcode == 0, (folder / "said").read_text()


@pytest.mark.parametrize(
    "document", [d for d in DOCUMENTS if blocks(d, "sh") or blocks(d, "python")], ids=name
)
def test_all_code_blocks_of_a_document_run(document: Path, tmp_path: Path) -> None:
    """Run the shell commands of a document in order, then its Python blocks as one script."""
    program = tmp_path / "blocks.py"
    program.write_text("\n".join(blocks(document, "python")), encoding="utf-8")
    run(tmp_path, [line for block in blocks(document, "sh") for line in logical_lines(block)], program)


@pytest.mark.parametrize("example", EXAMPLES, ids=name)
def test_every_example_program_runs_without_error(example: Path, tmp_path: Path) -> None:
    run(tmp_path, [], example)


def anchors(document: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_all_links_of_the_documents_have_a_target(document: Path) -> None:
    for link in _LINK.findall(_BLOCK.sub("", document.read_text(encoding="utf-8"))):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        assert target.exists(), f"{document.name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{target.name} has no heading {anchor}"


def table_rows(text: str) -> list[dict[str, str]]:
    """Return all rows of Markdown tables as dictionaries from column heading to cell."""
    rows: list[dict[str, str]] = []
    headings: list[str] = []
    for line in text.splitlines():
        if not line.startswith("|"):
            headings = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not headings:
            headings = cells
        elif set(line) - set("|-: "):
            rows.append(dict(zip(headings, cells, strict=True)))
    return rows


@pytest.mark.parametrize(
    ("document", "experiment", "count"),
    [
        ("docs/evidence.md", "001-controls", 4),
        ("docs/evidence.md", "005-policy", 6),
        ("docs/adr/0003-start-seeds-as-two-cancelling-branches.md", "002-zero-layer", 10),
        ("docs/adr/0005-kaiming-weights-for-cnn-hosts.md", "003-host-init", 8),
        ("docs/adr/0010-compare-environments-with-equal-randomness.md", "009-critics", 2),
        ("docs/adr/0012-state-value-critic-and-conditioned-heads.md", "006-sandboxes", 4),
        ("docs/adr/0012-state-value-critic-and-conditioned-heads.md", "009-critics", 3),
        ("docs/adr/0013-spread-forget-gates-and-skip-forced-rows.md", "006-sandboxes", 3),
        ("docs/slots.md", "007-slots", 3),
        ("docs/growing.md", "010-batchnorm", 3),
        ("docs/expand.md", "026-expand", 18),
    ],
)
def test_table_rows_quoted_in_documents_equal_the_tables_of_the_experiments(
    document: str, experiment: str, count: int
) -> None:
    measured = table_rows((ROOT / "experiments" / experiment / "table.md").read_text(encoding="utf-8"))
    quoted = [
        row
        for row in table_rows((ROOT / document).read_text(encoding="utf-8"))
        if row.keys() <= measured[0].keys()
    ]
    assert len(quoted) >= count
    for row in quoted:
        assert any(row.items() <= source.items() for source in measured), row
