"""How should the convolutions of a narrow host start: weights and biases, each torch's own or another?

Run with ``.venv/bin/python experiments/003-host-init/run.py`` (about six minutes on one core); it
rewrites table.md beside this file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import nn

from esper.karn.statistics import estimate
from esper.kasmina.hosts import Host
from esper.leyline import Controller
from esper.tamiyo import OffController, PeriodicController, parse_plan
from esper.tolaria.episode import run_episode
from esper.tolaria.seeding import TRAINING_SEEDS
from esper.tolaria.tasks import TaskSpec, task_named
from esper.tolaria.tasks.spec import Instance
from esper.tolaria.vector import SerialVector

RNG_SEEDS = TRAINING_SEEDS[:30]
PLAN = "conv_heavy/fast@r0c0:0,conv_heavy/fast@r0c1:1,conv_heavy/fast@r0c2:2"
STUCK_BELOW = 15.0
HERE = Path(__file__).parent


def torch_default(layer: nn.Conv2d) -> None:
    layer.reset_parameters()


def without_bias(layer: nn.Conv2d) -> None:
    layer.reset_parameters()
    nn.init.zeros_(layer.bias)


def kaiming(layer: nn.Conv2d) -> None:
    layer.reset_parameters()
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")


def kaiming_without_bias(layer: nn.Conv2d) -> None:
    kaiming(layer)
    nn.init.zeros_(layer.bias)


STARTS: dict[str, Callable[[nn.Conv2d], None]] = {
    "torch's weights, torch's bias": torch_default,
    "torch's weights, bias 0": without_bias,
    "Kaiming weights, torch's bias": kaiming,
    "Kaiming weights, bias 0": kaiming_without_bias,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarted(TaskSpec):
    """A task whose host begins with other initial values in its convolutions."""

    start: Callable[[nn.Conv2d], None]

    def build_host(self, instance: Instance) -> Host:
        host = TaskSpec.build_host(self, instance)
        for layer in host.modules():
            if isinstance(layer, nn.Conv2d):
                self.start(layer)
        return host


def episode(task: TaskSpec, rng_seed: int, grow: bool) -> tuple[float, float]:
    """The test score of one episode, and the share of its host's channels that were dead at the start."""
    vector = SerialVector(task, rng_seed=rng_seed)
    vector.reset()
    dead = dead_share(vector)
    space = vector.action_space
    controller: Controller = (
        PeriodicController(space, parse_plan(PLAN, space)) if grow else OffController(space)
    )
    (report,) = run_episode(vector, controller)
    return report.test_score, dead


@torch.inference_mode()
def dead_share(vector: SerialVector) -> float:
    """Share of channels that are zero at every position of every validation image."""
    env = vector.envs[0]
    h = env.host.splits.validation.x
    dead = []
    for segment in list(env.model.host.segments)[:-1]:
        h = segment(h)
        dead.append(h.amax(dim=(0, 2, 3)) == 0)
    return torch.cat(dead).float().mean().item()


def main() -> None:
    torch.set_num_threads(1)
    preset = task_named("digits_impaired")
    settings = {field.name: getattr(preset, field.name) for field in fields(preset)}
    lines = [
        f"| initial values | seeds | test score | episodes below {STUCK_BELOW:.0f} | dead at the start |",
        "|---|---|---|---|---|",
    ]
    for name, start in STARTS.items():
        for grow in (False, True):
            episodes = [episode(Restarted(**settings, start=start), rng_seed, grow) for rng_seed in RNG_SEEDS]
            scores = [score for score, _ in episodes]
            stuck = sum(score < STUCK_BELOW for score in scores)
            dead = sum(dead for _, dead in episodes) / len(episodes)
            seeds = "3 heavy, steps 0-2" if grow else "none"
            row = (name, seeds, str(estimate(scores)), f"{stuck} of {len(episodes)}", f"{100 * dead:.0f} %")
            lines.append(f"| {' | '.join(row)} |")
            print(lines[-1], [round(score) for score in scores], flush=True)
    (HERE / "table.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
