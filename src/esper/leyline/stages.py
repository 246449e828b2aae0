"""Stages of a slot, and the table of legal moves between stages.

All sets of stages (live, in the forward pass, cooling down) are derived from ``LEGAL_MOVES``.
"""

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray


class Stage(IntEnum):
    """Stage of a slot; its value is its index in the one-hot block of the observation."""

    UNKNOWN = 0
    DORMANT = 1
    GERMINATED = 2
    TRAINING = 3
    BLENDING = 4
    HOLDING = 5
    FOSSILIZED = 6
    PRUNED = 7
    EMBARGOED = 8
    RESETTING = 9


NUM_STAGES: Final = len(Stage)
STAGE_NAMES: Final = tuple(stage.name for stage in Stage)

LEGAL_MOVES: Final[Mapping[Stage, frozenset[Stage]]] = {
    Stage.UNKNOWN: frozenset({Stage.DORMANT}),
    Stage.DORMANT: frozenset({Stage.GERMINATED}),
    Stage.GERMINATED: frozenset({Stage.TRAINING, Stage.PRUNED}),
    Stage.TRAINING: frozenset({Stage.BLENDING, Stage.PRUNED}),
    Stage.BLENDING: frozenset({Stage.HOLDING, Stage.PRUNED}),
    Stage.HOLDING: frozenset({Stage.FOSSILIZED, Stage.BLENDING, Stage.PRUNED}),
    Stage.FOSSILIZED: frozenset(),
    Stage.PRUNED: frozenset({Stage.EMBARGOED}),
    Stage.EMBARGOED: frozenset({Stage.RESETTING}),
    Stage.RESETTING: frozenset({Stage.DORMANT}),
}


def _reachable(start: Stage, *, without: Stage) -> frozenset[Stage]:
    """Return ``start`` and all stages that legal moves reach from it without entering the stage
    ``without``."""
    found = {start}
    while targets := {target for stage in found for target in LEGAL_MOVES[stage]} - found - {without}:
        found |= targets
    return frozenset(found)


def _lookup(stages: Iterable[Stage]) -> NDArray[np.bool_]:
    table = np.isin(list(Stage), list(stages))
    table.setflags(write=False)
    return table


LIVE_STAGES: Final = frozenset(s for s in Stage if Stage.PRUNED in LEGAL_MOVES[s])
"""Stages of a slot whose seed can still be pruned."""
FORWARD_STAGES: Final = _reachable(Stage.BLENDING, without=Stage.PRUNED)
"""Stages of a slot whose seed changes the output of the forward pass."""
COOLING_STAGES: Final = _reachable(Stage.PRUNED, without=Stage.DORMANT)
"""Stages of a slot after the removal of a seed and before DORMANT."""
OCCUPIED_STAGES: Final = _reachable(Stage.GERMINATED, without=Stage.PRUNED)
"""Stages of a slot with an attached seed, live or fossilized."""

IS_LIVE: Final = _lookup(LIVE_STAGES)
IN_FORWARD: Final = _lookup(FORWARD_STAGES)
IS_OCCUPIED: Final = _lookup(OCCUPIED_STAGES)
"""Lookup tables ``[stage]``: whether a stage is live, in the forward pass, or occupied."""
