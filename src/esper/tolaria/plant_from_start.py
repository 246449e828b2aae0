"""Training from scratch with seeds that are active from the first minibatch."""

from collections.abc import Iterable

from esper.kasmina import lifecycle
from esper.leyline import BLEND_IDS, Stage
from esper.tolaria.env import MorphEnv


def plant_fossils(env: MorphEnv, seeds: Iterable[tuple[int, int, int]]) -> None:
    """Plant seeds (slot, blueprint, style), in the order of slots, as fossils of a new episode."""
    model, table = env.model, env.table
    for number, (slot, blueprint, style) in enumerate(seeds):
        params = model.germinate(slot, blueprint, style)
        seed = lifecycle.Germination(number, blueprint, style, 1.0, 0, params)
        env.host.count(lifecycle.germinate(table, 0, slot, seed, model.rules))
        table.stage[0, slot], table.alpha[0, slot] = Stage.FOSSILIZED, 1.0
        # The seeds count as old fossils, whose contributions are not measured: all compute is used for
        # training.
        table.epochs_in_stage[0, slot] = model.rules.fossil_watch_epochs + 1
    model.sync()


def seeds_of(env: MorphEnv) -> str:
    """Return the fossilized seeds as the text of a plan with one seed per step:
    ``blueprint/style@slot:step,...``.
    """
    table, space = env.table, env.action_space
    fossils = [slot for slot in range(table.num_slots) if table.stage[0, slot] == Stage.FOSSILIZED]
    return ",".join(
        f"{space.blueprint_names[table.blueprint[0, slot]]}/{BLEND_IDS[table.style[0, slot]]}"
        f"@{space.slot_config.slot_ids[slot]}:{number}"
        for number, slot in enumerate(fossils)
    )
