"""The do-nothing twin: the same host, data and random streams with every slot left empty."""

from __future__ import annotations

import numpy as np

from esper.leyline.factored_actions import CANONICAL_ACTION
from esper.tolaria.env import LifeReport, MorphEnv
from esper.tolaria.tasks.spec import TaskSpec


def live_without_growth(task: TaskSpec, *, rng_seed: int, env: int = 0, episode: int = 0) -> LifeReport:
    """The report of a life in which nobody ever acts."""
    twin = MorphEnv(task, rng_seed=rng_seed, env=env)
    twin.reset(episode)
    action = np.array(CANONICAL_ACTION)
    while not twin.ended:
        twin.step(action)
    return twin.finish()
