from itertools import product
from operator import attrgetter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline import (
    ALPHA_SPEED_EPOCHS,
    ALPHA_TARGET_VALUES,
    BLEND_IDS,
    BLUEPRINT_IDS,
    CANONICAL_ACTION,
    CNN_BLUEPRINTS,
    HEAD_NAMES,
    OP_NAMES,
    STYLE_CURVES,
    STYLE_OPERATORS,
    TEMPO_EPOCHS,
    TRANSFORMER_BLUEPRINTS,
    ActionSpace,
    EsperError,
    FactoredAction,
    Head,
    LifecycleRules,
    SlotConfig,
    canonicalise,
    check_actions,
    head_sizes,
    heads_read,
)
from esper.leyline.errors import InvalidActionError

WAIT, GERMINATE, SET_ALPHA, PRUNE, FOSSILIZE, ADVANCE = range(6)
SIZES = (6, 3, 13, 4, 3, 3, 4, 5)


def test_head_names_ramp_lengths_alpha_targets_and_styles_have_the_specified_values() -> None:
    assert (
        *("op", "slot", "blueprint", "style", "tempo"),
        *("alpha_target", "alpha_speed", "alpha_curve"),
    ) == HEAD_NAMES
    assert TEMPO_EPOCHS == (3, 5, 8)
    assert ALPHA_SPEED_EPOCHS == (0, 3, 5, 8)
    assert ALPHA_TARGET_VALUES == (0.5, 0.7, 1.0)
    assert [op.name for op in STYLE_OPERATORS] == ["ADD", "MULTIPLY", "ADD", "GATE"]
    assert [curve.name for curve in STYLE_CURVES] == ["LINEAR", "LINEAR", "SIGMOID", "LINEAR"]


def test_blueprint_sets_of_cnn_and_transformer_hosts_are_as_specified() -> None:
    assert {BLUEPRINT_IDS[b] for b in CNN_BLUEPRINTS} == {
        *("norm", "attention", "conv_small", "depthwise", "bottleneck", "conv_light", "conv_heavy")
    }
    assert {BLUEPRINT_IDS[b] for b in TRANSFORMER_BLUEPRINTS} == {
        *("norm", "lora", "lora_large", "attention", "flex_attention", "mlp_small", "mlp")
    }


def test_factored_action_of_every_index_tuple_has_the_values_of_the_lookup_tables() -> None:
    """The action space has one slot, to keep the number of index tuples small."""
    assert head_sizes(3) == SIZES
    assert FactoredAction.from_indices([1, 2, 1, 0, 0, 0, 0, 0]).slot == 2
    questions = [f"is_{name.lower()}" for name in OP_NAMES]
    shown = attrgetter("indices", "op.name", "blueprint_id", "blend_id", "operator", *questions)
    is_op = np.eye(6, dtype=bool).tolist()
    for indices in product(*map(range, head_sizes(1))):
        op, _, blueprint, style, *_ = indices
        looked_up = (OP_NAMES[op], BLUEPRINT_IDS[blueprint], BLEND_IDS[style], STYLE_OPERATORS[style])
        assert shown(FactoredAction.from_indices(indices)) == (indices, *looked_up, *is_op[op])


@pytest.mark.parametrize("head", [0, 2, 3, 4, 5, 6, 7])
def test_factored_action_from_indices_raises_for_an_index_out_of_range(head: int) -> None:
    indices = [0] * 8
    indices[head] = SIZES[head]
    with pytest.raises(ValueError, match=f"{SIZES[head]} is not a valid"):
        FactoredAction.from_indices(indices)


CANONICAL = [0, 0, 0, 0, 1, 2, 0, 0]
"""Canonical values of the eight heads: WAIT, slot 0, NOOP, LINEAR_ADD, STANDARD, FULL, INSTANT, LINEAR."""


@pytest.mark.parametrize(
    ("op", "speed", "alpha", "expected", "read"),
    [
        (WAIT, 1, 0.5, [WAIT, 0, 0, 0, 1, 2, 0, 0], "op"),
        (GERMINATE, 1, 0.0, [GERMINATE, 2, 7, 3, 0, 1, 0, 0], "op slot blueprint style tempo alpha_target"),
        (SET_ALPHA, 1, 0.5, [SET_ALPHA, 2, 0, 0, 1, 1, 1, 4], "op slot alpha_target alpha_speed alpha_curve"),
        # At alpha speed INSTANT the alpha curve head is not read.
        (SET_ALPHA, 0, 0.5, [SET_ALPHA, 2, 0, 0, 1, 1, 0, 0], "op slot alpha_target alpha_speed"),
        (PRUNE, 1, 0.5, [PRUNE, 2, 0, 0, 1, 2, 1, 4], "op slot alpha_speed alpha_curve"),
        (PRUNE, 0, 0.5, [PRUNE, 2, 0, 0, 1, 2, 0, 0], "op slot alpha_speed"),
        # A prune at alpha 0 has no alpha ramp, so it reads neither alpha speed nor alpha curve.
        (PRUNE, 3, 0.0, [PRUNE, 2, 0, 0, 1, 2, 0, 0], "op slot"),
        (FOSSILIZE, 1, 1.0, [FOSSILIZE, 2, 0, 0, 1, 2, 0, 0], "op slot"),
        (ADVANCE, 1, 1.0, [ADVANCE, 2, 0, 0, 1, 2, 0, 0], "op slot"),
    ],
)
def test_canonicalise_sets_heads_that_the_op_does_not_read_to_canonical_values(
    op: int, speed: int, alpha: float, expected: list[int], read: str
) -> None:
    action = np.array([[op, 2, 7, 3, 0, 1, speed, 4]])
    flags = heads_read(action, np.array([alpha]))[0]
    assert [name for name, flag in zip(HEAD_NAMES, flags, strict=True) if flag] == read.split()
    assert CANONICAL_ACTION.tolist() == CANONICAL
    assert canonicalise(action, np.array([alpha])).tolist() == [expected]


@given(st.tuples(*(st.integers(0, size - 1) for size in SIZES)), st.sampled_from([0.0, 0.3, 1.0]))
def test_canonicalise_is_idempotent_and_keeps_heads_that_the_op_reads(
    indices: tuple[int, ...], alpha: float
) -> None:
    once = canonicalise(np.array([indices]), np.array([alpha]))
    twice = canonicalise(once, np.array([alpha]))
    np.testing.assert_array_equal(twice, once)
    read = heads_read(np.array([indices]), np.array([alpha]))
    np.testing.assert_array_equal(once[read], np.array([indices])[read])


def test_check_actions_reports_environment_and_head_of_an_invalid_index() -> None:
    good = np.tile(CANONICAL_ACTION, (2, 1))
    check_actions(good, num_envs=2, num_slots=3)
    with pytest.raises(InvalidActionError, match=r"must have shape \(3, 8\); found \(2, 8\)"):
        check_actions(good, num_envs=3, num_slots=3)
    bad = good.copy()
    bad[1, 1] = 3
    with pytest.raises(
        InvalidActionError, match="head slot of environment 1 has value 3; allowed are 0 to 2"
    ):
        check_actions(bad, num_envs=2, num_slots=3)
    bad[1, 1] = -1
    with pytest.raises(InvalidActionError, match="head slot of environment 1 has value -1"):
        check_actions(bad, num_envs=2, num_slots=3)


def test_action_made_from_names_has_canonical_values_in_heads_that_are_left_out():
    space = ActionSpace(
        SlotConfig(("layer1", "layer2")), LifecycleRules(), (1, 2), ("noop", "conv_light", "norm")
    )

    assert space.action("wait").tolist() == [CANONICAL_ACTION.tolist()]
    planted = space.action("germinate", slot="layer2", blueprint="norm", style="gated_gate")
    assert planted[0, [Head.OP, Head.SLOT, Head.BLUEPRINT, Head.STYLE]].tolist() == [1, 1, 2, 3]
    assert planted[0, 4:].tolist() == CANONICAL_ACTION[4:].tolist()
    for wrong, words in (
        ({"op": "plant"}, "unknown op 'PLANT'"),
        ({"op": "prune", "slot": "layer3"}, r"unknown slot 'layer3'; did you mean"),
        ({"op": "germinate", "blueprint": "noop"}, "unknown blueprint 'noop'.*conv_light, norm"),
        ({"op": "prune", "place": "layer1"}, "unknown part of a decision 'place'"),
    ):
        with pytest.raises(EsperError, match=words):
            space.action(**wrong)
