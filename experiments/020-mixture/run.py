"""Does a controller that reacts beat every plan where instances differ? Arms on the mixture of 019-headroom.

Two designs, each trained three times:

* ``ppo``: ``esper train --preset mixture --rng-seed K --out runs/mixture-K`` for K = 0, 1, 2.
* ``greedy``: a model of realised gains, fitted to the episodes of 019-headroom and acted on greedily. It is
  kernel ridge regression of each plan's score on what the first facts of an episode show, the minibatches
  that its budget buys and what a seed costs; three fits, each to a bootstrap sample of the 24 instances.

They are compared on 20 unseen rng seeds of two episodes each, every episode an instance of its own, all arms
at the episode's own budget. The score is that of 019-headroom, 100 · log(loss of the ungrown twin / loss) on
the test split, so ``off`` scores 0. ``schedule`` is the one best plan of 019, found with about as many
episodes as a training used. ``shuffled`` shows a controller the features of another episode. Intervals are
95 %, by bootstrap over trainings and rng seeds.

Run with ``.venv/bin/python experiments/020-mixture/run.py DIRECTORY …``, the run directories of the
trainings. It goes on where it stopped and rewrites table.md beside this file.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from esper.build import one_thread
from esper.leyline import ActionSpace, Controller, EpochFacts, SlotTable
from esper.leyline.protocols import Decisions
from esper.tamiyo import (
    CountingController,
    HeuristicController,
    OffController,
    PeriodicController,
    RandomController,
    parse_plan,
)
from esper.tamiyo.counting import CountingSettings
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCritic
from esper.tamiyo.policy.checkpoint import load_policy
from esper.tamiyo.policy.controller import PolicyController
from esper.tolaria.env import MorphEnv
from esper.tolaria.episode import run_episode
from esper.tolaria.seeding import TEST_SEEDS
from esper.tolaria.vector import SerialVector

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "019-headroom"))
import run as headroom  # noqa: E402  an experiment is a folder, not a package

RESULTS = HERE / "results.jsonl"
TASK, PLANS = headroom.TASK, headroom.PLANS
RNG_SEEDS, EPISODES = TEST_SEEDS[:20], 2
FITS = 3
Make = Callable[[ActionSpace, int, int], Controller]
"""A controller from the action space, the rng seed and the episode that it is for."""


# --- controllers -----------------------------------------------------------------------------------


def planned(space: ActionSpace, plan: str) -> Controller:
    text = ",".join(f"conv_light@{headroom.SLOTS[entry[0]]}:{entry[1:]}" for entry in plan.split())
    return PeriodicController(space, parse_plan(text, space)) if plan else OffController(space)


class Counting(CountingController):
    """The counting controller where seeds are convolutions instead of copies."""

    def __init__(self, space: ActionSpace, **settings: Any) -> None:
        super().__init__(space, 1, CountingSettings(blueprint="conv_light", **settings))

    def decide(self, facts: EpochFacts, table: SlotTable) -> Decisions:
        return super().decide(replace(facts, growth_factor=1.0 + facts.candidate_cost), table)


def seen_at_first(minibatches_left: float, candidate_cost: float) -> tuple[float, float]:
    return math.log2(1.0 + minibatches_left), math.log2(1.0 + candidate_cost)


class GainModel:
    """Kernel ridge regression of each plan's score on the first facts of an episode."""

    def __init__(self, cells: headroom.Cells, numbers: Sequence[int]) -> None:
        facts = {n: MorphEnv(headroom.point(headroom.drawn(n)), rng_seed=0).reset() for n in set(numbers)}
        self._x = np.array(
            [seen_at_first(facts[n].minibatches_left, facts[n].candidate_cost) for n in numbers]
        )
        kernel = self._kernel(self._x) + 0.5 * np.eye(len(numbers))
        gains = np.array([[cells.score(n, p, "val", headroom.CHOOSING) for p in PLANS] for n in numbers])
        self._weights = np.linalg.solve(kernel, gains)

    def _kernel(self, x: np.ndarray) -> np.ndarray:
        return np.exp(-0.5 * ((x[:, None] - self._x[None]) ** 2).sum(axis=-1))

    def best_plan(self, first: tuple[float, float]) -> str:
        return PLANS[int(np.argmax(self._kernel(np.array([first])) @ self._weights))]


class GreedyController:
    """Follows the plan that promises most, given the first facts of its episode, or of ``other`` if given."""

    name = "greedy"

    def __init__(
        self, space: ActionSpace, model: GainModel, other: tuple[float, float] | None = None
    ) -> None:
        self._space, self._model, self._other = space, model, other
        self.reset(0)

    def reset(self, episode: int) -> None:
        self._plan: Controller | None = None

    def decide(self, facts: EpochFacts, table: SlotTable) -> Decisions:
        if self._plan is None:
            own = seen_at_first(float(facts.minibatches_left[0]), float(facts.candidate_cost[0]))
            self._plan = planned(self._space, self._model.best_plan(self._other or own))
        return self._plan.decide(facts, table)


def next_rng_seed(rng_seed: int) -> int:
    return RNG_SEEDS[(RNG_SEEDS.index(rng_seed) + 1) % len(RNG_SEEDS)]


def shuffled_policy(policy: FactoredRecurrentActorCritic) -> Make:
    """The policy on what it saw in the same episode of the next rng seed."""

    def make(space: ActionSpace, rng_seed: int, episode: int) -> Controller:
        vector = SerialVector(TASK, rng_seed=next_rng_seed(rng_seed))
        vector.reset(episode)
        other = PolicyController(vector.action_space, 1, policy)
        run_episode(vector, other, episode)
        return PolicyController(space, 1, policy, shown=other.observations)

    return make


def shuffled_model(model: GainModel) -> Make:
    def make(space: ActionSpace, rng_seed: int, episode: int) -> Controller:
        facts = MorphEnv(TASK, rng_seed=next_rng_seed(rng_seed)).reset(episode)
        return GreedyController(space, model, seen_at_first(facts.minibatches_left, facts.candidate_cost))

    return make


CONTROLS: dict[str, Make] = {
    "off": lambda space, rng_seed, episode: OffController(space),
    "random": lambda space, rng_seed, episode: RandomController(space, rng_seed, env_indices=(0,)),
    "heuristic": lambda space, rng_seed, episode: HeuristicController(space, num_envs=1),
    "counting": lambda space, rng_seed, episode: Counting(space),
    "counting, hasty": lambda space, rng_seed, episode: Counting(space, least_steps=2, least_minibatches=20),
}


# --- results ---------------------------------------------------------------------------------------


class Cells:
    """Losses by arm, rng seed and episode, on disk."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, int, int], dict[str, float]] = {}
        if RESULTS.exists():
            for row in map(json.loads, RESULTS.read_text().splitlines()):
                self.known[row["arm"], row["rng_seed"], row["episode"]] = row

    def get(self, arm: str, rng_seed: int, episode: int, make: Make) -> dict[str, float]:
        """One episode, from the file or run now."""
        key = (arm, rng_seed, episode)
        if key not in self.known:
            vector = SerialVector(TASK, rng_seed=rng_seed)
            vector.reset(episode)
            (report,) = run_episode(vector, make(vector.action_space, rng_seed, episode), episode)
            grown = report.params - report.host_params
            self.known[key] = {
                "test": math.log(report.test_loss),
                "points": report.test_score,
                "grown": grown,
            }
            with RESULTS.open("a") as file:
                place = {"arm": arm, "rng_seed": rng_seed, "episode": episode}
                file.write(json.dumps(place | self.known[key]) + "\n")
        return self.known[key]

    def scores(self, arm: str, make: Make) -> list[float]:
        """Mean lead over the twin by rng seed."""
        found = []
        for rng_seed in RNG_SEEDS:
            twins = [self.get("off", rng_seed, e, CONTROLS["off"])["test"] for e in range(EPISODES)]
            own = [self.get(arm, rng_seed, e, make)["test"] for e in range(EPISODES)]
            found.append(100 * float(np.mean(twins) - np.mean(own)))
        return found


def interval(ahead: np.ndarray) -> str:
    """Mean of ``ahead [training, rng seed]`` with its 95 % interval."""
    rng = np.random.default_rng(0)
    trainings, seeds = ahead.shape
    draws = [
        ahead[rng.integers(trainings, size=trainings)][:, rng.integers(seeds, size=seeds)].mean()
        for _ in range(10_000)
    ]
    low, high = np.quantile(draws, [0.025, 0.975])
    return f"{ahead.mean():+.1f} ({low:+.1f} to {high:+.1f})"


def main(directories: Sequence[Path]) -> None:
    cells, episodes = Cells(), headroom.Cells()
    plan = headroom.one_best_plan(episodes)
    designs: dict[str, tuple[list[Make], list[Make]]] = {}
    rng = np.random.default_rng(0)
    models = [
        GainModel(episodes, rng.integers(headroom.INSTANCES, size=headroom.INSTANCES).tolist())
        for _ in range(FITS)
    ]
    designs["greedy"] = (
        [lambda space, s, e, model=model: GreedyController(space, model) for model in models],
        [shuffled_model(model) for model in models],
    )
    policies = [load_policy(directory / "best") for directory in directories]
    if policies:
        designs["ppo"] = (
            [lambda space, s, e, policy=policy: PolicyController(space, 1, policy) for policy in policies],
            [shuffled_policy(policy) for policy in policies],
        )
    arms = {arm: np.array([cells.scores(arm, make)]) for arm, make in CONTROLS.items()}
    arms["schedule"] = np.array([cells.scores(f"plan {plan}", lambda space, s, e: planned(space, plan))])
    for name, (makes, shuffled) in designs.items():
        arms[name] = np.array([cells.scores(f"{name}-{k}", make) for k, make in enumerate(makes)])
        arms[f"{name}, shuffled"] = np.array(
            [cells.scores(f"{name}-{k} shuffled", make) for k, make in enumerate(shuffled)]
        )
    lines = ["| arm | score | " + " | ".join(f"{name} ahead by" for name in designs) + " |"]
    lines.append("|---|---|" + "---|" * len(designs))
    for arm, found in arms.items():
        said = f"schedule ({plan or 'never'})" if arm == "schedule" else arm
        ahead = [
            "" if arm == name or (name not in arm and "shuffled" in arm) else interval(arms[name] - found)
            for name in designs
            if arm not in designs or arm == name or len(found) == len(arms[name])
        ]
        lines.append(f"| {said} | {found.mean():+.1f} | " + " | ".join(ahead) + " |")
    for name in designs:
        lines += [
            "",
            f"{name}, one by one: " + ", ".join(f"{found.mean():+.1f}" for found in arms[name]) + ".",
        ]
    (HERE / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    with one_thread():
        main([Path(word) for word in sys.argv[1:]])
