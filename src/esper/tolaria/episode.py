"""One episode, from the untrained host to the commit: the loop that everything else hangs on."""

from collections.abc import Callable, Sequence

from esper.leyline.protocols import Controller
from esper.tolaria.episode_report import EpisodeReport
from esper.tolaria.vector import SerialVector


def run_episode(
    vector: SerialVector,
    controller: Controller,
    episode: int = 0,
    *,
    twin_scores: Sequence[float] | None = None,
    after_epoch: Callable[[], None] = lambda: None,
) -> list[EpisodeReport]:
    """Decide, act, train and measure until the last epoch; one report per environment."""
    facts = vector.reset(episode, twin_scores)
    controller.reset(episode)
    while not facts.ended.all():
        decisions = controller.decide(facts, vector.table)
        facts = vector.step(decisions.actions)
        vector.record_decisions(decisions.outputs)
        after_epoch()
    return vector.finish()
