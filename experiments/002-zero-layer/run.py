"""Which part of a seed should start at zero: its last layer, or a scale on its output?

Run with ``.venv/bin/python experiments/002-zero-layer/run.py`` (about one minute on one core); it
rewrites results.json and table.md beside this file. The cells run in this process, because a
blueprint is registered per process.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from esper import register_blueprint
from esper.config import run_config
from esper.karn.statistics import estimate, paired_difference
from esper.kasmina.blueprints.conv import ConvHeavy, ConvLight
from esper.study import Cell, run_cell
from esper.tolaria.seeding import TEST_SEEDS

RNG_SEEDS = TEST_SEEDS[:5]
HERE = Path(__file__).parent


class ZeroScale(nn.Module):
    """scale·f(h): ``f`` with torch's own initial values throughout, one scale per channel at zero."""

    def __init__(self, layers: nn.Sequential, width: int) -> None:
        super().__init__()
        for layer in layers:
            if isinstance(layer, nn.Conv2d):
                layer.reset_parameters()
        self.layers = layers
        self.scale = nn.Parameter(torch.zeros(width, 1, 1))

    def forward(self, h: Tensor) -> Tensor:
        return self.scale * self.layers(h)


@register_blueprint("heavy_scaled", topology="feature_map")
def heavy_scaled(width: int) -> nn.Module:
    return ZeroScale(ConvHeavy(width), width)


@register_blueprint("light_scaled", topology="feature_map")
def light_scaled(width: int) -> nn.Module:
    return ZeroScale(ConvLight(width), width)


def three(blueprint: str) -> str:
    """The same seed in all three slots, at steps 0 to 2."""
    return ",".join(f"{blueprint}/fast@r0c{slot}:{slot}" for slot in range(3))


def periodic(blueprint: str) -> dict[str, object]:
    return {"decider": "periodic", "plan": three(blueprint)}


ARMS: dict[str, dict[str, object]] = {
    "off": {"decider": "off"},
    "3 heavy, last layer at zero": periodic("conv_heavy"),
    "3 heavy, scale at zero": periodic("heavy_scaled"),
    "3 light, last layer at zero": periodic("conv_light"),
    "3 light, scale at zero": periodic("light_scaled"),
}


def table(results: dict[str, list[Cell]]) -> str:
    """The arms as Markdown; ± is the 95 % interval."""
    off = [cell.test_score for cell in results["off"]]
    lines = ["| arm | test score | paired: above off | parameters |", "|---|---|---|---|"]
    for arm, cells in results.items():
        scores = [cell.test_score for cell in cells]
        above_off = "" if arm == "off" else str(paired_difference(scores, off))
        params = sum(cell.params for cell in cells) / len(cells)
        lines.append(f"| {arm} | {estimate(scores)} | {above_off} | {params:,.0f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    torch.set_num_threads(1)
    settings = {arm: {"task": "digits_impaired", "steps": 20, **own} for arm, own in ARMS.items()}
    results: dict[str, list[Cell]] = {}
    for arm, own in settings.items():
        results[arm] = []
        for rng_seed in RNG_SEEDS:
            cell = run_cell(arm, run_config(**own, rng_seed=rng_seed))
            results[arm].append(cell)
            print(f"{arm:<30} {rng_seed} {cell.test_score:5.1f}  refused {cell.refused}", flush=True)
    cells = [cell.as_dict() for cells in results.values() for cell in cells]
    (HERE / "results.json").write_text(json.dumps({"settings": settings, "cells": cells}, indent=1) + "\n")
    (HERE / "table.md").write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main()
