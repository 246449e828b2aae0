"""How should a seed start at zero: cancelling branches, a last layer of zeros, or a scale of zero?

Run with ``.venv/bin/python experiments/002-zero-layer/run.py`` (about four minutes on one core); it
rewrites results.json and table.md beside this file. The cells run in this process, because a
blueprint is registered per process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from esper import register_blueprint
from esper.karn.statistics import estimate, paired_difference
from esper.kasmina.blueprints import unregister_blueprint
from esper.kasmina.blueprints.conv import HEAVY_MIN_HIDDEN
from esper.run.run_config import run_config
from esper.tolaria.seeding import TEST_SEEDS

sys.path.insert(0, str(Path(__file__).parents[1]))
from cells import Cell, run_cell

RNG_SEEDS = TEST_SEEDS[:10]
HERE = Path(__file__).parent


class ZeroScale(nn.Module):
    """scale·f(h): ``f`` with torch's own initial values throughout, one scale per channel at zero."""

    def __init__(self, layers: nn.Sequential, width: int) -> None:
        super().__init__()
        self.layers = layers
        self.scale = nn.Parameter(torch.zeros(width, 1, 1))

    def forward(self, h: Tensor) -> Tensor:
        return self.scale * self.layers(h)


def small(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(width, 2 * width, 1), nn.GELU(), nn.Conv2d(2 * width, width, 1))


def depthwise(width: int) -> nn.Sequential:
    """Two filters a channel, as the mirrored one has in its two branches."""
    return nn.Sequential(
        nn.Conv2d(width, 2 * width, 3, padding=1, groups=width), nn.Conv2d(2 * width, width, 1)
    )


def heavy(width: int) -> nn.Sequential:
    hidden = max(HEAVY_MIN_HIDDEN, 2 * width)
    return nn.Sequential(
        nn.Conv2d(width, hidden, 3, padding=1), nn.ReLU(), nn.Conv2d(hidden, width, 3, padding=1)
    )


def light(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(width, width, 3, padding=1))


def zero_layer(layers: nn.Sequential) -> nn.Sequential:
    for weight in layers[-1].parameters():
        nn.init.zeros_(weight)
    return layers


unregister_blueprint("stack", "feature_map")  # its index is needed for the fifth of these
TWO_LAYERS = {"conv_small": small, "depthwise": depthwise, "conv_heavy": heavy}
for name, build in TWO_LAYERS.items():
    register_blueprint(f"{name}_layer", topology="feature_map")(
        lambda width, build=build: zero_layer(build(width))
    )
for name, build in {"conv_heavy": heavy, "conv_light": light}.items():
    register_blueprint(f"{name}_scale", topology="feature_map")(
        lambda width, build=build: ZeroScale(build(width), width)
    )


def three(blueprint: str) -> dict[str, object]:
    """The same seed in all three slots, at steps 0 to 2."""
    plan = ",".join(f"{blueprint}/fast@r0c{slot}:{slot}" for slot in range(3))
    return {"controller": "periodic", "plan": plan}


ARMS: dict[str, dict[str, object]] = {"off": {"controller": "off"}}
for name in TWO_LAYERS:
    ARMS[f"3 {name}, branches that cancel"] = three(name)
    ARMS[f"3 {name}, last layer at zero"] = three(f"{name}_layer")
ARMS |= {
    "3 conv_heavy, scale at zero": three("conv_heavy_scale"),
    "3 conv_light, its layer at zero": three("conv_light"),
    "3 conv_light, scale at zero": three("conv_light_scale"),
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
            print(f"{arm:<36} {rng_seed} {cell.test_score:5.1f}  refused {cell.refused}", flush=True)
    cells = [cell.as_dict() for cells in results.values() for cell in cells]
    (HERE / "results.json").write_text(json.dumps({"settings": settings, "cells": cells}, indent=1) + "\n")
    (HERE / "table.md").write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main()
