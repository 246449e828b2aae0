"""The ten stages of a slot and the one table of legal moves between them.

Every predicate about stages (which are live, which take part in the forward pass, which are
cooling down) is computed from ``LEGAL_MOVES``, so that a change of the lifecycle is a change of
one table.
"""

from collections.abc import Iterable, Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray


class Stage(IntEnum):
    """What a slot holds; the value is the index in the observation's one-hot block."""

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


NUM_STAGES: Final = 10
STAGE_NAMES: Final = tuple(stage.name for stage in Stage)

LEGAL_MOVES: Final[Mapping[Stage, frozenset[Stage]]] = MappingProxyType(
    {
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
)


def is_legal_move(origin: Stage, target: Stage) -> bool:
    """Whether the lifecycle allows ``origin`` → ``target`` in one move."""
    return target in LEGAL_MOVES[origin]


def _reachable(start: Stage, *, without: Stage) -> frozenset[Stage]:
    """Stages reachable from ``start`` (itself included) along legal moves that avoid ``without``."""
    found = {start}
    frontier = [start]
    while frontier:
        for target in LEGAL_MOVES[frontier.pop()]:
            if target is not without and target not in found:
                found.add(target)
                frontier.append(target)
    return frozenset(found)


def _lookup(stages: Iterable[Stage]) -> NDArray[np.bool_]:
    table = np.zeros(NUM_STAGES, dtype=np.bool_)
    table[list(stages)] = True
    table.setflags(write=False)
    return table


LIVE_STAGES: Final = frozenset(s for s in Stage if Stage.PRUNED in LEGAL_MOVES[s])
"""A seed is attached and could still be pruned."""
FORWARD_STAGES: Final = _reachable(Stage.BLENDING, without=Stage.PRUNED)
"""The seed changes the value of the forward pass."""
COOLING_STAGES: Final = _reachable(Stage.PRUNED, without=Stage.DORMANT)
"""The slot is on its way back to empty."""
OCCUPIED_STAGES: Final = _reachable(Stage.GERMINATED, without=Stage.PRUNED)
"""A seed module sits in the slot: live or fossilized."""

IS_LIVE: Final = _lookup(LIVE_STAGES)
IN_FORWARD: Final = _lookup(FORWARD_STAGES)
IS_OCCUPIED: Final = _lookup(OCCUPIED_STAGES)
"""Lookup tables ``[NUM_STAGES]``, indexed by arrays of stages."""

if len(Stage) != NUM_STAGES:
    raise RuntimeError(f"NUM_STAGES (={NUM_STAGES}) does not match the {len(Stage)} stages")
