"""Measurements into the slot table: how the seeds of one network learn, and what they are worth."""

import math

from esper.leyline.slot_table import SlotTable
from esper.tolaria.counterfactual import Counterfactuals
from esper.tolaria.epoch import EpochTraining


def record_training(table: SlotTable, trained: EpochTraining) -> None:
    """Store the gradient statistics of an epoch; gate G2 waits for them."""
    for slot, statistics in trained.seeds.items():
        table.record_gradients(
            0,
            slot,
            norm=statistics.norm,
            ratio=statistics.norm / trained.host_norm if trained.host_norm > 0 else math.nan,
            health=statistics.health,
            vanishing=statistics.vanishing,
            exploding=statistics.exploding,
        )


def record_worth(table: SlotTable, result: Counterfactuals) -> None:
    """Store contributions, Shapley values and interactions; gate G5 waits for them."""
    sums, boosts = result.interaction_sums(), result.strongest_boosts()
    for index, slot in enumerate(result.slots):
        table.record_contribution(0, slot, float(result.contribution[index]), float(result.error[index]))
        table.shapley[0, slot] = result.shapley[index]
        table.interaction_sum[0, slot] = sums[index]
        table.strongest_boost[0, slot] = boosts[index]
