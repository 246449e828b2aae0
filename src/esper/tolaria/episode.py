"""Loop of one episode from the untrained host to the commit, and planting of seeds before the first epoch."""

from collections.abc import Callable, Iterable, Sequence

from esper.kasmina import lifecycle
from esper.leyline import BLEND_IDS, Stage
from esper.leyline.signals import Controller
from esper.tolaria.env import EpisodeReport, MorphEnv
from esper.tolaria.vector import SerialVector


def run_episode(
    vector: SerialVector,
    controller: Controller,
    episode: int = 0,
    *,
    twin_scores: Sequence[float] | None = None,
    after_epoch: Callable[[], None] = lambda: None,
) -> list[EpisodeReport]:
    """Run one episode: let the controller decide before every epoch, and train until the last epoch.

    Args:
        vector: Environments in which the episode is run.
        controller: Controller that chooses the actions.
        episode: Number of the episode, which selects its random streams.
        twin_scores: Validation scores of the do-nothing twin by epoch, for the telemetry rows.
        after_epoch: Function that is called after every epoch.

    Returns:
        One episode report per environment.
    """
    facts = vector.reset(episode, twin_scores)
    controller.reset(episode)
    while not facts.ended.all():
        decisions = controller.decide(facts, vector.table)
        facts = vector.step(decisions.actions)
        vector.record_decisions(decisions.outputs)
        after_epoch()
    return vector.finish()


def plant_fossils(env: MorphEnv, seeds: Iterable[tuple[int, int, int]]) -> None:
    """Plant ``seeds``, triples of slot, blueprint and style, as fossils before the first epoch."""
    model, table = env.model, env.table
    for number, (slot, blueprint, style) in enumerate(seeds):
        params = model.germinate(slot, blueprint, style)
        seed = lifecycle.Germination(number, blueprint, style, 1.0, 0, params)
        env.host.count(lifecycle.germinate(table, 0, slot, seed, model.rules))
        table.stage[0, slot], table.alpha[0, slot] = Stage.FOSSILIZED, 1.0
        # Contributions of fossils older than ``fossil_watch_epochs`` are not measured, so training gets all
        # compute.
        table.epochs_in_stage[0, slot] = model.rules.fossil_watch_epochs + 1
    model.sync()


def seeds_of(env: MorphEnv) -> str:
    """Return the fossilized seeds as the text of a plan that plants one of them per step."""
    table, space = env.table, env.action_space
    fossils = [slot for slot in range(table.num_slots) if table.stage[0, slot] == Stage.FOSSILIZED]
    return ",".join(
        f"{space.blueprint_names[table.blueprint[0, slot]]}/{BLEND_IDS[table.style[0, slot]]}"
        f"@{space.slot_config.slot_ids[slot]}:{number}"
        for number, slot in enumerate(fossils)
    )
