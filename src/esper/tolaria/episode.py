"""One host life, start to commit: the loop that everything else hangs on."""

from __future__ import annotations

from collections.abc import Callable

from esper.leyline.protocols import DecisionMaker, ThinkingDecisionMaker
from esper.tolaria.env import LifeReport
from esper.tolaria.vector import SerialVector


def run_episode(
    vector: SerialVector,
    decider: DecisionMaker,
    episode: int = 0,
    after_epoch: Callable[[], None] = lambda: None,
) -> list[LifeReport]:
    """Decide, apply, train, judge, until the last epoch; one report per environment."""
    facts = vector.reset(episode)
    decider.reset(episode)
    while not facts.ended.all():
        actions = decider.decide(facts, vector.table)
        if isinstance(decider, ThinkingDecisionMaker):
            for env, thought in zip(vector.envs, decider.thoughts, strict=True):
                env.thought = thought
        facts = vector.step(actions)
        after_epoch()
    return vector.finish()
