"""Every training over its iterations, as a picture: what its policy reached, and its entropy."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper.leyline import HEAD_NAMES

sys.path.insert(0, str(Path(__file__).parents[1]))
from cells import Cell

WIDTH, LEFT, RIGHT = 760, 52, 190
COLOURS = ("#0072b2", "#d55e00", "#009e73")
GREY = "#767676"
DASHES = {"blueprint": "", "tempo": "5 3"}


@dataclass(frozen=True)
class Panel:
    """A diagram over iterations; ``top`` and ``height`` are pixels of the picture."""

    title: str
    top: int
    height: int
    last_iteration: int
    highest: float
    ticks: Sequence[float]

    def x(self, number: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * number / self.last_iteration

    def y(self, value: float) -> float:
        return self.top + self.height * (1 - value / self.highest)

    def frame(self) -> list[str]:
        parts = [f'<text x="{LEFT}" y="{self.top - 10}" font-weight="bold">{self.title}</text>']
        for tick in self.ticks:
            parts += [self.level(tick, "#e3e3e3"), _text(LEFT - 8, self.y(tick) + 4, f"{tick:g}", "end")]
        iterations = range(0, self.last_iteration + 1, 10)
        return parts + [_text(self.x(n), self.top + self.height + 18, str(n), "middle") for n in iterations]

    def level(self, value: float, colour: str, dash: str = "") -> str:
        return (
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{self.y(value):.1f}" y2="{self.y(value):.1f}"'
            f' stroke="{colour}" stroke-dasharray="{dash}"/>'
        )

    def line(self, points: Sequence[tuple[float, float]], colour: str, dash: str = "") -> str:
        path = " ".join(f"{self.x(number):.1f},{self.y(value):.1f}" for number, value in points)
        return (
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"'
            f' stroke-dasharray="{dash}"/>'
        )


def draw_curves(trainings: dict[str, dict[str, Any]], results: dict[str, list[Cell]]) -> str:
    """Evaluation score with the heuristic's and the bare host's as lines; below it two heads' entropy."""
    last = max(len(training["iterations"]) for training in trainings.values())
    score = Panel(
        "Validation score of argmax episodes on the selection rng seeds",
        36,
        260,
        last,
        100,
        range(0, 101, 20),
    )
    entropy = Panel("Entropy of two heads where they had a choice", 364, 120, last, 1, (0, 0.5, 1))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 536" font-family="sans-serif"'
        ' font-size="12"><rect width="100%" height="100%" fill="white"/>',
        *score.frame(),
        *entropy.frame(),
        _text(entropy.x(last / 2), 524, "iteration of 16 episodes", "middle"),
    ]
    for control in ("heuristic", "off"):
        level = sum(cell.val_score for cell in results[control]) / len(results[control])
        parts.append(score.level(level, GREY, "1 3"))
        parts.append(_text(WIDTH - RIGHT + 6, score.y(level) + 4, f"{control}, test rng seeds", colour=GREY))
    for row, ((arm, training), colour) in enumerate(zip(trainings.items(), COLOURS, strict=False)):
        iterations = training["iterations"]
        evaluated = [
            (r["iteration"], r["evaluation_score"]) for r in iterations if r["evaluation_score"] is not None
        ]
        parts.append(score.line(evaluated, colour))
        parts.append(_text(WIDTH - RIGHT + 6, 150 + 18 * row, f"training with {arm}", colour=colour))
        for head, dash in DASHES.items():
            found = [(r["iteration"], r["head_entropy"][HEAD_NAMES.index(head)]) for r in iterations]
            parts.append(entropy.line([point for point in found if point[1] is not None], colour, dash))
    for row, (head, dash) in enumerate(DASHES.items()):
        y = entropy.top + 40 + 18 * row
        parts.append(
            f'<line x1="{WIDTH - RIGHT + 6}" x2="{WIDTH - RIGHT + 30}" y1="{y - 4}" y2="{y - 4}"'
            f' stroke="{GREY}" stroke-width="1.8" stroke-dasharray="{dash}"/>'
        )
        parts.append(_text(WIDTH - RIGHT + 36, y, head))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, words: str, anchor: str = "start", colour: str = "black") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{words}</text>'
