"""Does a controller that reacts beat every plan where instances differ? Arms on the mixture of 019-headroom.

Learned controllers, each trained three times:

* ``ppo``: ``esper train --preset mixture --rng-seed K --out runs/mixture-K`` for K = 0, 1, 2; 864 episodes
  to learn from and 96 to choose the best policy by, each.
* ``greedy``: a model of realised gains, acted on greedily. It is kernel ridge regression of each plan's score
  on what the first facts of an episode show, the minibatches that its budget buys and what a seed costs;
  three fits to the 576 episodes of 019-headroom that choose, each to a bootstrap sample of its 24 instances.

Compared on 20 rng seeds that nothing was run on before, twelve episodes each, every episode an instance of
its own, all arms at the episode's own budget. The score is that of 019-headroom, 100 · log(loss of the
ungrown twin / loss) on the test split, so ``off`` scores 0. ``schedule`` is the plan that schedule.py found
with 1,056 episodes. ``shuffled`` shows a controller the features of the next episode of its rng seed.
Intervals are 95 %, by bootstrap over trainings and rng seeds; p-values by Student's t, after Holm over the
other arms.

Run with ``.venv/bin/python experiments/020-mixture/run.py DIRECTORY …``, the run directories of the
trainings. It goes on where it stopped and rewrites table.md beside this file.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import schedule
import torch
from arms import EpisodeTree, counting, models, planned

from esper.karn.resampling import FloatArray, holm, mean_interval, p_value, paired
from esper.leyline import Controller
from esper.study.processes import in_processes
from esper.tamiyo import HeuristicController, RandomController
from esper.tamiyo.policy.checkpoint import load_policy
from esper.tamiyo.policy.controller import PolicyController
from esper.tolaria.seeding import TEST_SEEDS
from esper.tolaria.tasks.spec import Instance

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
RNG_SEEDS, EPISODES = TEST_SEEDS[2000:2020], 12
TRAININGS = 3
LEARNED = ("ppo", "greedy")
SHUFFLED = " shuffled"
Row = dict[str, Any]


def kind(instance: Instance) -> str:
    host, most = "blind" if instance.kernel == 1 else "sees", instance.budget_share >= 0.25
    return f"{host}, {'70 to 280' if most else '9 to 56'} MFLOP"


def run_rng_seed(rng_seed: int, plan: str, directories: Sequence[Path]) -> list[Row]:
    """Every arm on the episodes of one rng seed."""
    torch.set_num_threads(1)
    trees = [EpisodeTree(rng_seed, episode) for episode in range(EPISODES)]
    gain_models, policies = models(TRAININGS), [load_policy(directory / "best") for directory in directories]
    rows: list[Row] = []

    def run(arm: str, tree: EpisodeTree, controller: Controller) -> None:
        report = tree.run(controller)
        place = {"arm": arm, "rng_seed": rng_seed, "episode": tree.episode, "kind": kind(tree.instance)}
        grown = report.params - report.host_params
        rows.append({**place, "log_loss": math.log(report.test_loss), "grown": grown})

    for tree in trees:
        space = tree.space
        run("off", tree, planned(space, ""))
        run("random", tree, RandomController(space, rng_seed, env_indices=(0,)))
        run("heuristic", tree, HeuristicController(space, num_envs=1))
        run("counting", tree, counting(space))
        run("counting, hasty", tree, counting(space, least_steps=2, least_minibatches=20))
        run("schedule", tree, planned(space, plan))
    others = trees[1:] + trees[:1]
    for k, model in enumerate(gain_models):
        for tree, other in zip(trees, others, strict=True):
            run(f"greedy-{k}", tree, planned(tree.space, model.best_plan(tree.first)))
            run(f"greedy-{k}{SHUFFLED}", tree, planned(tree.space, model.best_plan(other.first)))
    for k, policy in enumerate(policies):
        own = [PolicyController(tree.space, 1, policy) for tree in trees]
        for tree, controller in zip(trees, own, strict=True):
            run(f"ppo-{k}", tree, controller)
        for tree, other in zip(trees, own[1:] + own[:1], strict=True):
            shown = PolicyController(tree.space, 1, policy, shown=other.observations)
            run(f"ppo-{k}{SHUFFLED}", tree, shown)
    return rows


# --- table -----------------------------------------------------------------------------------------


def scores(rows: Sequence[Row]) -> dict[str, FloatArray]:
    """Mean lead over the twin by arm, ``[training, rng seed]``."""
    found = {(row["arm"], row["rng_seed"], row["episode"]): row["log_loss"] for row in rows}

    def lead(arm: str) -> list[float]:
        return [
            100 * float(np.mean([found["off", s, e] - found[arm, s, e] for e in range(EPISODES)]))
            for s in RNG_SEEDS
        ]

    names = list(dict.fromkeys(row["arm"] for row in rows))
    arms = {name: np.array([lead(name)]) for name in names if not name.startswith(LEARNED)}
    for name in LEARNED:
        for suffix in ("", SHUFFLED):
            arms[name + suffix] = np.array([lead(f"{name}-{k}{suffix}") for k in range(TRAININGS)])
    return arms


def compared(arms: dict[str, FloatArray], name: str) -> dict[str, str]:
    """How far a learned arm is ahead of every arm but the other one's shuffled form."""
    (other,) = set(LEARNED) - {name}
    ahead = {
        arm: paired(arms[name], score) for arm, score in arms.items() if arm not in (name, other + SHUFFLED)
    }
    adjusted = holm({arm: p_value(difference) for arm, difference in ahead.items()})
    said = {}
    for arm, difference in ahead.items():
        value, low, high = mean_interval(difference)
        p = f"p = {adjusted[arm]:.3f}" if adjusted[arm] >= 0.001 else "p < 0.001"
        said[arm] = f"{value:+.1f} ({low:+.1f} to {high:+.1f}), {p}"
    return said


def table(rows: Sequence[Row], plan: str) -> str:
    arms = scores(rows)
    columns = {name: compared(arms, name) for name in LEARNED}
    lines = ["| arm | score | " + " | ".join(f"{name} ahead by" for name in LEARNED) + " |"]
    lines.append("|---|---|" + "---|" * len(LEARNED))
    for arm, score in arms.items():
        said = f"schedule ({plan or 'never'})" if arm == "schedule" else arm
        ahead = [columns[name].get(arm, "") for name in LEARNED]
        lines.append(f"| {said} | {score.mean():+.1f} | " + " | ".join(ahead) + " |")
    for name in LEARNED:
        each = ", ".join(f"{score:+.1f}" for score in arms[name].mean(axis=1))
        lines += ["", f"{name}, one by one: {each}."]
    return "\n".join([*lines, "", *by_kind(rows)]) + "\n"


def by_kind(rows: Sequence[Row]) -> list[str]:
    """Mean scores by host and budget: where an arm gains and loses."""
    off = {(row["rng_seed"], row["episode"]): row["log_loss"] for row in rows if row["arm"] == "off"}
    arms = ("schedule", *LEARNED)
    leads: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        arm = row["arm"].partition("-")[0]
        if arm in arms and not row["arm"].endswith(SHUFFLED):
            lead = 100 * (off[row["rng_seed"], row["episode"]] - row["log_loss"])
            leads.setdefault((row["kind"], arm), []).append(lead)
    lines = ["| instances | number | " + " | ".join(arms) + " |", "|---|---|" + "---|" * len(arms)]
    for name in sorted({name for name, _ in leads}):
        means = " | ".join(f"{fmean(leads[name, arm]):+.1f}" for arm in arms)
        lines.append(f"| {name} | {len(leads[name, 'schedule'])} | {means} |")
    return lines


def main(directories: Sequence[Path]) -> None:
    plan = schedule.best_plan()
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    done = {row["rng_seed"] for row in rows}
    jobs = [(rng_seed, plan, tuple(directories)) for rng_seed in RNG_SEEDS if rng_seed not in done]
    for new in in_processes(run_rng_seed, jobs, os.cpu_count() or 1):
        rows += new
        with RESULTS.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in new)
    text = table(rows, plan)
    (HERE / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:]])
