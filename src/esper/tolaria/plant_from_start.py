"""A grown network from scratch: its seeds are part of it before the first minibatch."""

from collections.abc import Iterable

from esper.kasmina import lifecycle
from esper.leyline.factored_actions import BLEND_IDS
from esper.leyline.stages import Stage
from esper.tolaria.env import MorphEnv


def plant_whole(env: MorphEnv, seeds: Iterable[tuple[int, int, int]]) -> None:
    """Put seeds (slot, blueprint, style) into a new episode as fossils at full alpha, upstream first."""
    model, table = env.model, env.table
    for number, (slot, blueprint, style) in enumerate(seeds):
        params = model.germinate(slot, blueprint, style)
        seed = lifecycle.Germination(number, blueprint, style, 1.0, 0, params)
        env.host.count(lifecycle.germinate(table, 0, slot, seed, model.rules))
        table.stage[0, slot], table.alpha[0, slot] = Stage.FOSSILIZED, 1.0
        # Old ones count as host: compute goes into training and not into what they contribute.
        table.epochs_in_stage[0, slot] = model.rules.fossil_watch_epochs + 1
    model.sync()


def seeds_of(env: MorphEnv) -> str:
    """The seeds of a committed network as a plan that names one a step: blueprint/style@slot:number."""
    table, space = env.table, env.action_space
    fossils = [slot for slot in range(table.num_slots) if table.stage[0, slot] == Stage.FOSSILIZED]
    return ",".join(
        f"{space.blueprint_names[table.blueprint[0, slot]]}/{BLEND_IDS[table.style[0, slot]]}"
        f"@{space.slot_config.slot_ids[slot]}:{number}"
        for number, slot in enumerate(fossils)
    )
