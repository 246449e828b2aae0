"""Does a policy beat every plan where instances differ? Controllers on the mixture ``digits_mixture``.

Three policies are trained, each with

    esper train --preset mixture --rng-seed K --out runs/mixture-K        (K = 0, 1, 2)

and compared on 20 unseen rng seeds of four episodes each, every episode an instance of its own, all arms at
the episode's own budget. The score is that of 019-headroom: 100 · log(loss of the ungrown twin / loss) on the
test split, with the twin of the same episode; so ``off`` scores 0.

``schedule`` is the best open-loop plan found with as many episodes as one training used: 15 plans on 24
episodes each, then the best four on 84 more, chosen by validation score on rng seed 0. ``shuffled`` is each
policy shown the features of another episode. Intervals are 95 %, by bootstrap over trainings and rng seeds.

Run with ``.venv/bin/python experiments/020-mixture/run.py NAME DIRECTORY …``: the name of the design and the
run directories of its trainings. It goes on where it stopped and rewrites table-NAME.md beside this file.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

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
from esper.tamiyo.policy.checkpoint import load_policy
from esper.tamiyo.policy.controller import PolicyController
from esper.tamiyo.policy.shuffled import ObservingController, ShuffledController
from esper.tolaria.episode import run_episode
from esper.tolaria.seeding import TEST_SEEDS
from esper.tolaria.tasks import task_named
from esper.tolaria.vector import SerialVector

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
TASK = task_named("digits_mixture")
RNG_SEEDS, EPISODES = TEST_SEEDS[:20], 4
SLOTS = {"a": "r0c0", "b": "r0c1", "c": "r0c2"}
PLANS = (
    *("", "a0", "b0", "b1", "b2", "b4", "c0", "c1", "c2"),
    *("b0 c1", "b2 c3", "b4 c5", "b0 c3", "a0 b1 c2", "b0 c1 a2"),
)
FIRST, THEN, KEPT = 24, 84, 4
Make = Callable[[ActionSpace, int], Controller]


class Counting(CountingController):
    """The counting controller where seeds are convolutions instead of copies."""

    def __init__(self, space: ActionSpace, **settings: float) -> None:
        super().__init__(space, 1, CountingSettings(blueprint="conv_light", **settings))  # type: ignore[arg-type]

    def decide(self, facts: EpochFacts, table: SlotTable) -> Decisions:
        return super().decide(replace(facts, growth_factor=1.0 + facts.candidate_cost), table)


def planned(space: ActionSpace, plan: str) -> Controller:
    text = ",".join(f"conv_light@{SLOTS[entry[0]]}:{entry[1:]}" for entry in plan.split())
    return PeriodicController(space, parse_plan(text, space)) if plan else OffController(space)


CONTROLS: dict[str, Make] = {
    "off": lambda space, rng_seed: OffController(space),
    "random": lambda space, rng_seed: RandomController(space, rng_seed, env_indices=(0,)),
    "heuristic": lambda space, rng_seed: HeuristicController(space, num_envs=1),
    "counting": lambda space, rng_seed: Counting(space),
    "counting, hasty": lambda space, rng_seed: Counting(space, least_steps=2, least_minibatches=20),
}


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
            (report,) = run_episode(vector, make(vector.action_space, rng_seed), episode)
            self.known[key] = {
                "val": math.log(report.val_loss),
                "test": math.log(report.test_loss),
                "points": report.test_score,
                "grown": int(report.params > report.host_params),
            }
            with RESULTS.open("a") as file:
                place = {"arm": arm, "rng_seed": rng_seed, "episode": episode}
                file.write(json.dumps(place | self.known[key]) + "\n")
        return self.known[key]

    def scores(self, arm: str, make: Make, part: str = "test") -> np.ndarray:
        """Mean lead over the twin by rng seed."""
        return np.array(
            [np.mean([self.lead(arm, s, e, make, part) for e in range(EPISODES)]) for s in RNG_SEEDS]
        )

    def lead(self, arm: str, rng_seed: int, episode: int, make: Make, part: str) -> float:
        twin = self.get("off", rng_seed, episode, CONTROLS["off"])
        return 100 * (twin[part] - self.get(arm, rng_seed, episode, make)[part])


def best_plan(cells: Cells) -> str:
    """The open-loop plan of ``schedule``."""

    def score(plan: str, episodes: range) -> float:
        make: Make = lambda space, rng_seed: planned(space, plan)  # noqa: E731
        return float(
            np.mean([cells.lead(f"plan {plan}" if plan else "off", 0, e, make, "val") for e in episodes])
        )

    kept = sorted(PLANS, key=lambda plan: score(plan, range(FIRST)))[-KEPT:]
    return max(kept, key=lambda plan: score(plan, range(FIRST + THEN)))


def shuffled(directory: Path) -> Callable[[int], Make]:
    """The policy of ``directory`` on what it saw in the same episode of the next rng seed."""
    policy = load_policy(directory / "best")
    seen: dict[tuple[int, int], list] = {}

    def of_episode(episode: int) -> Make:
        def make(space: ActionSpace, rng_seed: int) -> Controller:
            other = RNG_SEEDS[(RNG_SEEDS.index(rng_seed) + 1) % len(RNG_SEEDS)]
            if (other, episode) not in seen:
                vector = SerialVector(TASK, rng_seed=other)
                vector.reset(episode)
                own = PolicyController(vector.action_space, 1, policy)
                observing = ObservingController(vector.action_space, own, policy)
                run_episode(vector, observing, episode)
                seen[other, episode] = observing.seen
            return ShuffledController(space, policy, seen[other, episode])

        return make

    return of_episode


def interval(ppo: np.ndarray, other: np.ndarray) -> tuple[float, float, float]:
    """Mean of ``ppo [training, rng seed]`` − ``other [1 or training, rng seed]`` with its 95 % interval."""
    rng, difference = np.random.default_rng(0), ppo - other
    trainings, seeds = difference.shape
    draws = [
        difference[rng.integers(trainings, size=trainings)][:, rng.integers(seeds, size=seeds)].mean()
        for _ in range(10_000)
    ]
    return float(difference.mean()), *map(float, np.quantile(draws, [0.025, 0.975]))


def main(name: str, directories: list[Path]) -> None:
    cells = Cells()
    plan = best_plan(cells)
    arms: dict[str, np.ndarray] = {arm: cells.scores(arm, make)[None] for arm, make in CONTROLS.items()}
    arms["schedule"] = cells.scores(f"plan {plan}", lambda space, rng_seed: planned(space, plan))[None]
    ppo, blind = [], []
    for number, directory in enumerate(directories):
        policy, others = load_policy(directory / "best"), shuffled(directory)
        ppo.append(
            cells.scores(f"{name}-{number}", lambda space, rng_seed, p=policy: PolicyController(space, 1, p))
        )
        arm = f"{name}-{number} shuffled"
        blind.append(
            [
                np.mean([cells.lead(arm, seed, e, others(e), "test") for e in range(EPISODES)])
                for seed in RNG_SEEDS
            ]
        )
    arms["shuffled"] = np.array(blind)
    policies = np.array(ppo)
    lines = ["| arm | score | ppo ahead by (95 %) |", "|---|---|---|"]
    lines.append(f"| ppo, {len(ppo)} trainings | {policies.mean():+.1f} | |")
    for arm, found in arms.items():
        ahead, low, high = interval(policies, found)
        said = f"{arm} ({plan or 'never'})" if arm == "schedule" else arm
        lines.append(f"| {said} | {found.mean():+.1f} | {ahead:+.1f} ({low:+.1f} to {high:+.1f}) |")
    each = ", ".join(f"{scores.mean():+.1f}" for scores in policies)
    lines += ["", f"The trainings one by one: {each}."]
    text = "\n".join(lines) + "\n"
    (HERE / f"table-{name}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    with one_thread():
        main(sys.argv[1], [Path(word) for word in sys.argv[2:]])
