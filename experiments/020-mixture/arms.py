"""The controllers of this experiment, and episodes that share what they have in common."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from esper.leyline import ActionSpace, Controller, EpochFacts, SlotTable
from esper.leyline.slot_table import IntArray
from esper.tamiyo import CountingController, OffController, PeriodicController, parse_plan
from esper.tamiyo.counting import CountingSettings
from esper.tolaria.env import EpisodeReport, MorphEnv
from esper.tolaria.vector import SerialVector

sys.path.insert(0, str(Path(__file__).parent.parent / "019-headroom"))
import run as headroom

TASK, PLANS = headroom.TASK, headroom.PLANS


class Reached(NamedTuple):
    """What is known after some actions; the report once the episode has ended."""

    facts: EpochFacts
    table: SlotTable
    report: EpisodeReport | None


class EpisodeTree:
    """One episode under many controllers.

    It is deterministic: what actions lead to is run once, and a controller that begins like another one is
    shown what that one saw.
    """

    def __init__(self, rng_seed: int, episode: int) -> None:
        self.rng_seed, self.episode = rng_seed, episode
        vector = self._vector()
        self.space: ActionSpace = vector.action_space
        self.instance = vector.envs[0].host.instance
        self._reached: dict[bytes, Reached] = {}
        self._keep([], vector.reset(episode), vector)

    @property
    def first(self) -> EpochFacts:
        """What is known before the first action."""
        return self._reached[b""].facts

    def run(self, controller: Controller) -> EpisodeReport:
        """The report of the episode under ``controller``."""
        controller.reset(self.episode)
        actions: list[IntArray] = []
        vector: SerialVector | None = None
        while (reached := self._reached[_key(actions)]).report is None:
            actions.append(controller.decide(reached.facts, reached.table).actions)
            if _key(actions) in self._reached:
                continue
            if vector is None:
                vector = self._vector()
                for action in actions[:-1]:
                    vector.step(action)
            self._keep(actions, vector.step(actions[-1]), vector)
        return reached.report

    def _vector(self) -> SerialVector:
        vector = SerialVector(TASK, rng_seed=self.rng_seed)
        vector.reset(self.episode)
        return vector

    def _keep(self, actions: list[IntArray], facts: EpochFacts, vector: SerialVector) -> None:
        report = vector.finish()[0] if facts.ended.all() else None
        self._reached[_key(actions)] = Reached(facts, vector.table.copy(), report)


def _key(actions: list[IntArray]) -> bytes:
    return b"".join(action.tobytes() for action in actions)


# --- controllers -----------------------------------------------------------------------------------


def planned(space: ActionSpace, plan: str) -> Controller:
    text = ",".join(f"conv_light@{headroom.SLOTS[entry[0]]}:{entry[1:]}" for entry in plan.split())
    return PeriodicController(space, parse_plan(text, space)) if plan else OffController(space)


def counting(space: ActionSpace, **settings: Any) -> Controller:
    """The counting controller where seeds are convolutions instead of copies."""
    return CountingController(space, 1, CountingSettings(blueprint="conv_light", **settings))


def seen_at_first(facts: EpochFacts) -> tuple[float, float]:
    """What tells instances apart: the minibatches that the budget buys, and what a seed costs."""
    return math.log2(1.0 + float(facts.minibatches_left[0])), math.log2(1.0 + float(facts.candidate_cost[0]))


class GainModel:
    """Kernel ridge regression of each plan's score on the first facts of an episode.

    ``numbers`` are instances of 019-headroom, some of them several times.
    """

    def __init__(self, cells: headroom.Cells, numbers: Sequence[int]) -> None:
        tasks = {n: headroom.point(headroom.drawn(n)) for n in set(numbers)}
        first = {n: EpochFacts.stack([MorphEnv(task, rng_seed=0).reset()]) for n, task in tasks.items()}
        self._x = np.array([seen_at_first(first[n]) for n in numbers])
        kernel = self._kernel(self._x) + 0.5 * np.eye(len(numbers))
        gains = np.array([[cells.score(n, p, "val", headroom.CHOOSING) for p in PLANS] for n in numbers])
        self._weights = np.linalg.solve(kernel, gains)

    def _kernel(self, x: np.ndarray) -> np.ndarray:
        return np.exp(-0.5 * ((x[:, None] - self._x[None]) ** 2).sum(axis=-1))

    def best_plan(self, first: EpochFacts) -> str:
        """The plan that promises most, given the first facts of an episode."""
        return PLANS[int(np.argmax(self._kernel(np.array([seen_at_first(first)])) @ self._weights))]


def models(count: int) -> list[GainModel]:
    """Each fitted to a bootstrap sample of the 24 instances."""
    rng, cells = np.random.default_rng(0), headroom.Cells()
    samples = [rng.integers(headroom.INSTANCES, size=headroom.INSTANCES).tolist() for _ in range(count)]
    return [GainModel(cells, sample) for sample in samples]
