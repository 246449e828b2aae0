import numpy as np
import pytest

from esper.leyline import NUM_STAGES, STAGE_NAMES, Stage, is_legal_move
from esper.leyline.stages import COOLING_STAGES, IN_FORWARD, IS_LIVE, IS_OCCUPIED

MOVES = {
    "UNKNOWN": {"DORMANT"},
    "DORMANT": {"GERMINATED"},
    "GERMINATED": {"TRAINING", "PRUNED"},
    "TRAINING": {"BLENDING", "PRUNED"},
    "BLENDING": {"HOLDING", "PRUNED"},
    "HOLDING": {"FOSSILIZED", "BLENDING", "PRUNED"},
    "FOSSILIZED": set(),
    "PRUNED": {"EMBARGOED"},
    "EMBARGOED": {"RESETTING"},
    "RESETTING": {"DORMANT"},
}


def test_stage_values_are_indices_of_the_one_hot_block() -> None:
    assert tuple(MOVES) == STAGE_NAMES
    assert NUM_STAGES == 10


@pytest.mark.parametrize("origin", Stage)
def test_stage_moves_are_legal_only_if_listed_in_legal_moves(origin: Stage) -> None:
    assert {target.name for target in Stage if is_legal_move(origin, target)} == MOVES[origin.name]


@pytest.mark.parametrize(
    ("lookup", "stages"),
    [
        (IS_LIVE, {2, 3, 4, 5}),  # GERMINATED, TRAINING, BLENDING, HOLDING
        (IN_FORWARD, {4, 5, 6}),  # BLENDING, HOLDING, FOSSILIZED
        (IS_OCCUPIED, {2, 3, 4, 5, 6}),  # live or FOSSILIZED
    ],
)
def test_derived_sets_of_stages_have_the_specified_stages(lookup: np.ndarray, stages: set[int]) -> None:
    assert set(np.flatnonzero(lookup).tolist()) == stages
    assert lookup.shape == (10,)
    with pytest.raises(ValueError, match="read-only"):
        lookup[0] = True
    assert {7, 8, 9} == COOLING_STAGES  # PRUNED, EMBARGOED, RESETTING
