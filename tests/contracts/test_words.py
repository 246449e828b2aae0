"""Check that retired terms occur in no code, flag, telemetry column, terminal text or document."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RETIRED = {
    r"lives|life(?!cycle|time)|lived": "episode",
    r"rounds?(?![\w(]|[ -](?:robin|trip|number|decimal))": "iteration",
    r"passes(?=_|\s*[:=])|early_stop_pass": "update epoch",
    r"deciders?|decision[ _]?makers?": "controller",
    r"thoughts?|think\w*": "policy output",
    r"judg(?:e|es|ed|ing|ement|ements)": "evaluate, measure or check",
    r"paid|unpaid|bookkeeper|books|standings?": "reward terms, reward log, reward inputs",
    r"siblings?": "(removed)",
}
"""Regular expressions of retired words and parts of identifiers, with their replacements."""
SUCCESSORS = tuple(RETIRED.values())
ALLOWED = re.compile(
    r"stroke-line(?:cap|join)[=:] ?\\?\"?round|Math\.round|\.round\(|[\"/]decider[\"`]|outlives|adr/[\w-]+"
)
"""Allowed uses of retired words: names in SVG and JavaScript, names of ADR files and of a random stream."""
SUFFIXES = (".py", ".md", ".js", ".html", ".css", ".j2", ".toml")
EXEMPT = re.compile(r"^(?:docs/adr/|CHANGELOG|experiments/|tests/contracts/test_words|src/.*/vendor/|\.)")
WORDS = re.compile(
    r"(?<![a-z])(?:" + "|".join(f"(?P<w{i}>{word})" for i, word in enumerate(RETIRED)) + r")(?![a-z])",
    re.IGNORECASE,
)


def tracked_files() -> list[str]:
    """Return the text files of the working tree that git does not ignore."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        pytest.skip("no git checkout")
    return [name for name in listed if name.endswith(SUFFIXES) and not EXEMPT.match(name)]


def retired_words(text: str) -> list[str]:
    """Return each retired word in ``text`` with its line and its replacement."""
    # The words of a camel-case name are checked separately.
    spread = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "\u200b", ALLOWED.sub("", text))
    return [
        f"{spread.count(chr(10), 0, match.start()) + 1}: {match[0]!r}; say {SUCCESSORS[match.lastindex - 1]}"
        for match in WORDS.finditer(spread)
        if match.lastindex
    ]


@pytest.mark.parametrize(
    "text",
    ["one life", "two lives", "LifeReport", "evaluate_lives", "round 3", "--decider", "a Thought", "judged"],
)
def test_retired_words_are_found_in_capitals_plurals_and_identifiers(text: str) -> None:
    assert len(retired_words(text)) == 1


@pytest.mark.parametrize(
    "text", ["lifecycle", "LifecycleOp", "round(x)", "a live seed", "forward pass", "around"]
)
def test_words_that_contain_a_retired_word_are_allowed(text: str) -> None:
    assert retired_words(text) == []


def test_no_file_of_the_repository_contains_a_retired_word() -> None:
    found = [
        f"{name}:{place}" for name in tracked_files() for place in retired_words((ROOT / name).read_text())
    ]
    assert found == [], f"{len(found)} retired words"
