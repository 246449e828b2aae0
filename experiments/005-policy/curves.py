"""The evaluation score of every training over its rounds, as a picture."""

from __future__ import annotations

from typing import Any

from esper.study import Cell

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 400, 52, 180, 28, 44
COLOURS = ("#0072b2", "#d55e00", "#009e73")
DASHES = ("", "6 3", "2 3")
CONTROL_COLOUR = "#767676"


def draw_curves(trainings: dict[str, dict[str, Any]], results: dict[str, list[Cell]]) -> str:
    """Argmax lives on the selection rng seeds, validation score; the heuristic's as a line."""
    last = max(len(training["rounds"]) for training in trainings.values())

    def x(number: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * number / last

    def y(score: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - score / 100)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
        ' font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="16">Validation score of argmax lives on the selection rng seeds, points</text>',
        f'<text x="{x(last / 2)}" y="{HEIGHT - 8}" text-anchor="middle">round of 16 lives</text>',
    ]
    parts += [
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick)}" y2="{y(tick)}" stroke="#e3e3e3"/>'
        f'<text x="{LEFT - 8}" y="{y(tick) + 4}" text-anchor="end">{tick}</text>'
        for tick in range(0, 101, 20)
    ]
    parts += [
        f'<text x="{x(tick)}" y="{HEIGHT - 26}" text-anchor="middle">{tick}</text>'
        for tick in range(0, last + 1, 10)
    ]
    for control in ("heuristic", "off"):
        scores = [cell.val_score for cell in results[control]]
        level = y(sum(scores) / len(scores))
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{level}" y2="{level}" stroke="{CONTROL_COLOUR}"'
            f' stroke-dasharray="1 3"/><text x="{WIDTH - RIGHT + 6}" y="{level + 4}"'
            f' fill="{CONTROL_COLOUR}">{control} (test rng seeds)</text>'
        )
    variants = list(dict.fromkeys(arm.rpartition(", rng seed ")[0] for arm in trainings))
    for arm, training in trainings.items():
        variant, _, rng_seed = arm.rpartition(", rng seed ")
        points = [
            (x(row["round"]), y(row["evaluation_score"]))
            for row in training["rounds"]
            if row["evaluation_score"] is not None
        ]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        colour = COLOURS[variants.index(variant)]
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"'
            f' stroke-dasharray="{DASHES[int(rng_seed)]}"/>'
        )
    for row, variant in enumerate(variants):
        for column, dash in enumerate(DASHES):
            base = HEIGHT - BOTTOM - 20 - 18 * row
            start = WIDTH - RIGHT + 6 + 22 * column
            parts.append(
                f'<line x1="{start}" x2="{start + 18}" y1="{base}" y2="{base}" stroke="{COLOURS[row]}"'
                f' stroke-width="1.8" stroke-dasharray="{dash}"/>'
            )
        parts.append(f'<text x="{WIDTH - RIGHT + 74}" y="{base + 4}">{variant}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
