"""Draw sentences of the project at random, for a review of their clarity without the code around them.

    python tools/sample_prose.py --rng-seed 7 [--count 40] [--show-places]

The population has every sentence of every docstring, every comment (consecutive lines are one), every test
name and every commit subject since c0fdec3; each is equally likely.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "benchmarks", "tools")
FIRST_REVISION = "c0fdec3"
_DIRECTIVE = re.compile(r"#\s*(noqa|type:|fmt:|ruff:|!)|# -{3}")
_SECTION = re.compile("(Args|Returns|Raises|Yields|Example):")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`\"'(])|\n\s*\n")


class Sentence(NamedTuple):
    text: str
    place: str


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a docstring or comment, each on one line; indented code is left out."""
    lines, section = [], ""
    for line in text.splitlines():
        if match := _SECTION.fullmatch(line):
            section = match[1]
        # The description of each argument or exception in a docstring is a separate sentence.
        elif section in ("Args", "Raises") and re.match(" {4}[^ ]", line):
            lines.append(f"\n{line}")
        elif section in ("Args", "Raises", "Returns", "Yields") or not line.startswith("    "):
            lines.append(line)
    parts = (" ".join(part.split()) for part in _SENTENCE_END.split("\n".join(lines)))
    return [part for part in parts if re.search("[A-Za-z]{2}", part)]


def sentences_of(source: str, place: str) -> Iterator[Sentence]:
    """Yield the sentences of docstrings and comments and the test names of a Python source."""
    for node in ast.walk(ast.parse(source)):
        for text, line in _docstrings(node):
            yield from (Sentence(part, f"{place}:{line}") for part in split_sentences(text))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield Sentence(node.name, f"{place}:{node.lineno}")
    for text, line in _comments(source):
        yield from (Sentence(part, f"{place}:{line}") for part in split_sentences(text))


def _docstrings(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield string statements: docstrings of modules, classes, functions and attributes."""
    body = getattr(node, "body", [])
    for statement in body if isinstance(body, list) else []:
        match statement:
            case ast.Expr(value=ast.Constant(value=str() as text)):
                yield text.replace("\n" + " " * statement.col_offset, "\n"), statement.lineno


def _comments(source: str) -> Iterator[tuple[str, int]]:
    """Yield comments with the number of their first line; comments on consecutive lines are joined."""
    found: dict[int, str] = {}
    first = last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not _DIRECTIVE.match(token.string):
            line, continues = token.start[0], token.line.lstrip().startswith("#")
            first, last = (first if continues and line == last + 1 else line), line
            found[first] = f"{found.get(first, '')} {token.string.lstrip('# ')}"
    yield from ((text, line) for line, text in found.items())


def all_sentences() -> list[Sentence]:
    """Return all sentences of the project, in an order that does not depend on the file system."""
    files = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    found = [s for path in files for s in sentences_of(path.read_text(), str(path.relative_to(ROOT)))]
    command = ["git", "-C", str(ROOT), "log", "--format=%h %s", f"{FIRST_REVISION}..HEAD"]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    commits = [line.partition(" ") for line in log.splitlines()]
    return found + [Sentence(subject, f"commit {revision}") for revision, _, subject in commits]


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw sentences of the project at random.")
    parser.add_argument("--rng-seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--show-places", action="store_true", help="print file and line too")
    flags = parser.parse_args()
    drawn = random.Random(flags.rng_seed).sample(all_sentences(), flags.count)
    for number, (text, place) in enumerate(drawn, start=1):
        print(f"{number:>3}. {text}" + (f"  [{place}]" if flags.show_places else ""))


if __name__ == "__main__":
    main()
