"""Picture of both trainings: their losses on top of each other, and the seconds that each kill has cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, LEFT, RIGHT = 760, 56, 24
GREY, BLUE, ORANGE, GREEN = "#c9c9c9", "#0072b2", "#d55e00", "#009e73"


@dataclass(frozen=True)
class Panel:
    """Diagram over the epochs of a training; ``top`` and ``height`` are pixels of the picture."""

    title: str
    top: int
    height: int
    epochs: int
    highest: float
    ticks: Sequence[float]

    def x(self, epoch: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * epoch / self.epochs

    def y(self, value: float) -> float:
        return self.top + self.height * (1 - value / self.highest)

    def frame(self) -> list[str]:
        parts = [_text(LEFT, self.top - 12, self.title, weight="bold")]
        for tick in self.ticks:
            y = f"{self.y(tick):.1f}"
            parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#e8e8e8"/>')
            parts.append(_text(LEFT - 8, self.y(tick) + 4, f"{tick:g}", "end"))
        foot = self.top + self.height + 18
        return parts + [_text(self.x(n), foot, str(n), "middle") for n in range(0, self.epochs + 1, 20)]

    def line(self, values: Sequence[float], colour: str, width: float) -> str:
        path = " ".join(f"{self.x(n):.1f},{self.y(value):.1f}" for n, value in enumerate(values, 1))
        return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'

    def dot(self, epoch: float, value: float, colour: str) -> str:
        x, y = self.x(epoch), self.y(value)
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{colour}" fill-opacity="0.65"/>'


def draw(results: dict[str, Any]) -> str:
    """Return the picture as SVG."""
    undisturbed, disturbed = results["val_loss"]
    epochs, kills = len(undisturbed), results["kills"]
    restarts = [kill["imports"] + kill["loading"] for kill in kills if kill["loading"] is not None]
    most = max(*restarts, *(kill["repeated"] for kill in kills))
    loss = Panel("Validation loss", 40, 250, epochs, 2.5, (0, 0.5, 1, 1.5, 2, 2.5))
    step = 1 if most <= 6 else 2
    lost = Panel("Seconds lost by each kill", 366, 150, epochs, most * 1.05, range(0, int(most) + 1, step))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 560" font-family="sans-serif"'
        ' font-size="12"><rect width="100%" height="100%" fill="white"/>',
        *loss.frame(),
        *lost.frame(),
        _text(WIDTH - RIGHT, 552, "finished epochs", "end"),
        loss.line(undisturbed, GREY, 6),
        loss.line(disturbed, BLUE, 1.5),
    ]
    bottom = loss.top + loss.height
    for kill in kills:
        x = f"{loss.x(kill['epoch']):.1f}"
        parts.append(f'<line x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 6}" stroke="{ORANGE}"/>')
        parts.append(lost.dot(kill["epoch"], kill["repeated"], ORANGE))
        if kill["loading"] is not None:
            parts.append(lost.dot(kill["epoch"], kill["imports"] + kill["loading"], GREEN))
    names = [
        (70, GREY, "training without a kill"),
        (90, BLUE, f"training with {len(kills)} kills"),
        (110, ORANGE, "kills, by epoch"),
        (lost.top - 12, ORANGE, "training to repeat"),
        (lost.top + 6, GREEN, "start of a process until it trains"),
    ]
    for y, colour, name in names:
        parts.append(f'<rect x="460" y="{y - 9}" width="14" height="9" fill="{colour}"/>')
        parts.append(_text(482, y, name))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, words: str, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{words}</text>'
