"""The loop of one episode, from the untrained host to the commit."""

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
    """Decide, act, train and measure until the last epoch.

    Args:
        vector: Environments.
        controller: Chooses the actions.
        episode: Number of the episode, which selects its random streams.
        twin_scores: Validation scores of the do-nothing twin by epoch, for the rows.
        after_epoch: Called after every epoch.

    Returns:
        One report per environment.
    """
    facts = vector.reset(episode, twin_scores)
    controller.reset(episode)
    while not facts.ended.all():
        decisions = controller.decide(facts, vector.table)
        facts = vector.step(decisions.actions)
        vector.record_decisions(decisions.outputs)
        after_epoch()
    return vector.finish()
