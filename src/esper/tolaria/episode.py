"""One host episode, start to commit: the loop that everything else hangs on."""

from __future__ import annotations

from collections.abc import Callable

from esper.leyline.protocols import Controller, ThinkingDecisionMaker
from esper.tolaria.env import EpisodeReport
from esper.tolaria.vector import SerialVector


def run_episode(
    vector: SerialVector,
    controller: Controller,
    episode: int = 0,
    after_epoch: Callable[[], None] = lambda: None,
) -> list[EpisodeReport]:
    """Decide, apply, train, judge, until the last epoch; one report per environment."""
    facts = vector.reset(episode)
    controller.reset(episode)
    while not facts.ended.all():
        actions = controller.decide(facts, vector.table)
        if isinstance(controller, ThinkingDecisionMaker):
            for env, policy_output in zip(vector.envs, controller.policy_outputs, strict=True):
                env.policy_output = policy_output
        facts = vector.step(actions)
        after_epoch()
    return vector.finish()
