"""Are seeds alive at the second backward under the settings that episodes are really trained with?

The contract matrix asks for it on hosts and data of its own, with a mean loss and SGD 0.1 with
momentum. Here everything is the task's: its host and data, mean loss, SGD 0.05 with momentum. A margin
below 1 is below the bound of 1e-6 × the tensor's norm + 1e-8.

Run with ``.venv/bin/python experiments/004-alive/run.py`` (half a minute); it rewrites table.md.
"""

from __future__ import annotations

import dataclasses
from itertools import product
from pathlib import Path

import numpy as np
import torch

from esper.kasmina.actuator import apply_action
from esper.kasmina.blueprints import specs_for
from esper.leyline import BLEND_IDS, CANONICAL_ACTION, NUM_STYLES, Head, LifecycleOp, Tempo
from esper.tolaria.env import MorphEnv
from esper.tolaria.minibatch import Learner
from esper.tolaria.seeding import TRAINING_SEEDS
from esper.tolaria.tasks import task_named

RNG_SEEDS = TRAINING_SEEDS[:5]
HERE = Path(__file__).parent


def margin(task_name: str, incubated: bool, blueprint: int, style: int, slot: int, rng_seed: int) -> float:
    """The smallest gradient over its bound, among the tensors of one seed, at its second backward."""
    task = task_named(task_name)
    rules = dataclasses.replace(task.rules, min_training_epochs=2 if incubated else 0)
    env = MorphEnv(dataclasses.replace(task, rules=rules), rng_seed=rng_seed)
    env.reset()
    action = np.array(CANONICAL_ACTION)
    action[[Head.OP, Head.SLOT, Head.BLUEPRINT]] = LifecycleOp.GERMINATE, slot, blueprint
    action[[Head.STYLE, Head.TEMPO]] = style, Tempo.FAST
    apply_action(env.model, action, seed_id=0)
    if not incubated:
        env.table.alpha[0, slot] = 1.0
        env.model.sync()
    env.model.train()
    norms: list[float] = []
    for _ in range(2):
        norms = [p.detach().norm().item() for p in env.model.seed_parameters(slot)]
        chosen = env.host._cursor.next()
        x, y = env.host.splits.train.x[chosen], env.host.splits.train.y[chosen]
        Learner(env.model, env.host.optimiser, task.objective.loss, clip=float("inf")).run(x, y)
    gradients = [p.grad.norm().item() for p in env.model.seed_parameters(slot) if p.grad is not None]
    return min(g / (1e-6 * n + 1e-8) for g, n in zip(gradients, norms, strict=True))


def main() -> None:
    torch.set_num_threads(1)
    lines = ["| task | seed | blueprint | style | smallest margin | below 1 |", "|---|---|---|---|---|---|"]
    below = 0
    cells = product(("digits_impaired", "digits"), (True, False), specs_for("feature_map"), range(NUM_STYLES))
    for task, incubated, spec, style in cells:
        margins = [
            margin(task, incubated, spec.index, style, slot, rng_seed)
            for slot, rng_seed in product(range(3), RNG_SEEDS)
        ]
        dead = sum(m < 1 for m in margins)
        below += dead > 0
        how = "incubating" if incubated else "blended"
        row = (task, how, spec.name, BLEND_IDS[style], f"{min(margins):.2g}", f"{dead} of {len(margins)}")
        lines.append(f"| {' | '.join(row)} |")
    table = "\n".join(lines) + f"\n\n{below} of {len(lines) - 2} cells have an episode below the bound.\n"
    (HERE / "table.md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
