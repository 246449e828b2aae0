import numpy as np
import pytest

from esper.leyline import LEGAL_MOVES, NUM_STAGES, STAGE_NAMES, Stage
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


def test_ten_stages_have_the_specified_names_in_order() -> None:
    assert tuple(MOVES) == STAGE_NAMES
    assert NUM_STAGES == 10


@pytest.mark.parametrize("origin", Stage)
def test_legal_moves_from_each_stage_are_as_specified(origin: Stage) -> None:
    assert {target.name for target in LEGAL_MOVES[origin]} == MOVES[origin.name]


@pytest.mark.parametrize(
    ("lookup", "stages"),
    [
        (IS_LIVE, {2, 3, 4, 5}),  # Stages of a live seed: GERMINATED, TRAINING, BLENDING, HOLDING.
        (IN_FORWARD, {4, 5, 6}),  # Stages in the forward pass: BLENDING, HOLDING, FOSSILIZED.
        (IS_OCCUPIED, {2, 3, 4, 5, 6}),  # Stages of an occupied slot: those of a live seed and FOSSILIZED.
    ],
)
def test_each_set_of_stages_contains_the_specified_stages(lookup: np.ndarray, stages: set[int]) -> None:
    assert set(np.flatnonzero(lookup).tolist()) == stages
    assert lookup.shape == (10,)
    with pytest.raises(ValueError, match="read-only"):
        lookup[0] = True
    assert {7, 8, 9} == COOLING_STAGES  # Stages of a slot after a prune: PRUNED, EMBARGOED, RESETTING.
