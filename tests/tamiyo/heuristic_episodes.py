"""Functions that run single decisions and short episodes of the heuristic controller."""

from typing import Any

from esper.leyline import OP_GERMINATE, ActionSpace, Head, SlotTable, Stage, canonicalise
from esper.tamiyo import HeuristicController, HeuristicSettings
from tests.leyline.building import facts_of, put, space_of

HELD = {"age": 9, "alpha": 1.0, "alpha_target": 1.0, "blueprint": 7, "epochs_in_stage": 2}
LATE = 19
"""Epoch (of 20) that is too late for a germination, so that only rules for existing seeds apply."""


def decide(
    table: SlotTable, epoch: int = LATE, space: ActionSpace | None = None, **settings: Any
) -> list[int]:
    """Return the first action of a new heuristic controller for the slot table of one environment."""
    space = space or space_of(table.num_slots)
    controller = HeuristicController(space, 1, HeuristicSettings(**settings))
    actions = controller.decide(facts_of(epoch), table).actions
    return canonicalise(actions, table.alpha[[0], actions[:, Head.SLOT]])[0].tolist()


def held(contribution: float, error: float = 1.0, **columns: Any) -> SlotTable:
    """Return a slot table of three slots with a seed in HOLDING in the middle slot."""
    table = SlotTable.empty(1, 3)
    columns = {**HELD, "contribution": contribution, "contribution_error": error, **columns}
    put(table, 1, Stage.HOLDING, **columns)
    return table


class Episode:
    """Episode with eight slots and a seed of blueprint norm in slot 0; every germination succeeds."""

    def __init__(self, **settings: Any) -> None:
        settings = {"rotation": ("norm", "conv_heavy"), **settings}
        self.controller = HeuristicController(space_of(8), 1, HeuristicSettings(**settings))
        self.table = SlotTable.empty(1, 8)
        put(self.table, 0, Stage.TRAINING, blueprint=3)

    def plant(self, epoch: int) -> int:
        action = self.controller.decide(facts_of(epoch), self.table).actions[0]
        assert action[Head.OP] == OP_GERMINATE
        blueprint = int(action[Head.BLUEPRINT])
        put(self.table, int(action[Head.SLOT]), Stage.TRAINING, blueprint=blueprint)
        return blueprint

    def lose(self, slot: int) -> None:
        self.table.clear(0, slot)
        put(self.table, slot, Stage.EMBARGOED)
