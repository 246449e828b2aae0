import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esper.leyline import (
    CANONICAL_ACTION,
    HEADS_OF_OP,
    NUM_HEADS,
    AlphaSpeed,
    Head,
    LifecycleOp,
    SlotTable,
    Stage,
    head_sizes,
    legal_slots_by_op,
)
from esper.tamiyo.policy.action_masks import ActionMasks, compute_action_masks, compute_batch_masks
from esper.tamiyo.policy.distributions import EmptyMaskError
from tests.leyline.building import (
    CNN,
    TRANSFORMER,
    assert_canonical,
    assert_legal,
    put,
    random_table,
    space_of,
)
from tests.simic.oracles.trial import uniform_actions
from tests.tamiyo.policy.small_policies import busy_table


def chosen(op: int, slot: int = 0, speed: int = AlphaSpeed.FAST) -> Tensor:
    """Return one action with op, slot and alpha speed, on which the masks of other heads depend."""
    row = torch.zeros(1, NUM_HEADS, dtype=torch.int64)
    row[0, Head.OP], row[0, Head.SLOT], row[0, Head.ALPHA_SPEED] = op, slot, speed
    return row


def allowed(masks: ActionMasks, head: Head, choices: Tensor) -> list[int]:
    """Return the legal values of one head in environment 0."""
    return torch.nonzero(masks.of_head(head, choices)[0]).flatten().tolist()


def busy_masks(**rules: bool) -> ActionMasks:
    return compute_batch_masks(busy_table(), space_of(4, **rules))


def test_op_mask_allows_ops_that_are_legal_on_some_slot() -> None:
    every_op = list(LifecycleOp)
    assert allowed(busy_masks(auto_forward=False), Head.OP, chosen(0)) == every_op
    every_op.remove(LifecycleOp.ADVANCE)
    assert allowed(busy_masks(), Head.OP, chosen(0)) == every_op


@pytest.mark.parametrize(
    ("op", "slots"),
    [
        (LifecycleOp.WAIT, [0]),
        (LifecycleOp.GERMINATE, [0, 3]),
        (LifecycleOp.SET_ALPHA_TARGET, [1]),
        (LifecycleOp.PRUNE, [1, 2]),
        (LifecycleOp.FOSSILIZE, [1]),
        (LifecycleOp.ADVANCE, [2]),
    ],
)
def test_slot_mask_allows_the_legal_slots_of_the_op(op: int, slots: list[int]) -> None:
    assert allowed(busy_masks(auto_forward=False), Head.SLOT, chosen(op)) == slots


VALUES = {
    Head.BLUEPRINT: [1, 2, 3, 4, 5, 6, 7],  # Blueprints of a CNN host, without NOOP.
    Head.STYLE: [0, 1, 2, 3],
    Head.TEMPO: [0, 1, 2],
    Head.ALPHA_TARGET: [0, 1, 2],
    Head.ALPHA_SPEED: [0, 1, 2, 3],
    Head.ALPHA_CURVE: [0, 1, 2, 3, 4],
}
CANONICAL = {
    Head.BLUEPRINT: [0],
    Head.STYLE: [0],
    Head.TEMPO: [1],
    Head.ALPHA_TARGET: [2],
    Head.ALPHA_SPEED: [0],
    Head.ALPHA_CURVE: [0],
}


@pytest.mark.parametrize("op", LifecycleOp)
@pytest.mark.parametrize("head", VALUES)
def test_masks_allow_all_values_of_heads_that_the_op_reads_and_one_value_of_heads_it_does_not_read(
    op: LifecycleOp, head: Head
) -> None:
    masks = busy_masks(auto_forward=False)
    expected = VALUES[head] if HEADS_OF_OP[op, head] else CANONICAL[head]
    assert allowed(masks, head, chosen(op, slot=1)) == expected, "slot 1 is in HOLDING at full alpha"


def test_masks_of_prune_at_alpha_zero_allow_only_canonical_alpha_speed_and_alpha_curve() -> None:
    masks = busy_masks()
    assert allowed(masks, Head.ALPHA_SPEED, chosen(LifecycleOp.PRUNE, slot=2)) == [0]
    assert allowed(masks, Head.ALPHA_CURVE, chosen(LifecycleOp.PRUNE, slot=2)) == [0]
    assert allowed(masks, Head.ALPHA_SPEED, chosen(LifecycleOp.PRUNE, slot=1)) == [0, 1, 2, 3]


@pytest.mark.parametrize("op", [LifecycleOp.PRUNE, LifecycleOp.SET_ALPHA_TARGET])
def test_masks_allow_only_the_canonical_alpha_curve_at_alpha_speed_instant(op: int) -> None:
    masks = busy_masks()
    assert allowed(masks, Head.ALPHA_CURVE, chosen(op, slot=1, speed=AlphaSpeed.INSTANT)) == [0]
    assert allowed(masks, Head.ALPHA_CURVE, chosen(op, slot=1, speed=AlphaSpeed.SLOW)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("blueprints", [CNN, TRANSFORMER])
def test_blueprint_mask_allows_the_blueprints_of_the_host(blueprints: tuple[int, ...]) -> None:
    masks = compute_batch_masks(SlotTable.empty(1, 3), space_of(blueprints=blueprints))
    assert allowed(masks, Head.BLUEPRINT, chosen(LifecycleOp.GERMINATE)) == list(blueprints)


def test_masks_of_one_environment_have_an_environment_axis_of_length_1() -> None:
    table = SlotTable.empty(3, 4)
    put(table, 1, Stage.HOLDING, env=1, age=9, alpha=1.0, contribution=1.0)
    masks = compute_action_masks(table, 1, space_of(4))
    assert masks.slot_by_op.shape == (1, 6, 4)
    assert allowed(masks, Head.SLOT, chosen(LifecycleOp.FOSSILIZE)) == [1]
    assert masks.stages.tolist() == [[1, 5, 1, 1]]


def test_masks_do_not_change_when_the_slot_table_changes_later() -> None:
    table = SlotTable.empty(1, 2)
    masks = compute_batch_masks(table, space_of(2))
    put(table, 0, Stage.TRAINING, alpha=0.5)
    assert allowed(masks, Head.SLOT, chosen(LifecycleOp.GERMINATE)) == [0, 1]
    assert masks.alpha_is_zero.tolist() == [[True, True]]
    assert masks.stages.tolist() == [[1, 1]]


def test_empty_mask_error_reports_environment_and_stages() -> None:
    table = SlotTable.empty(2, 2)
    put(table, 0, Stage.EMBARGOED, env=1)
    put(table, 1, Stage.TRAINING, env=1)
    masks = compute_batch_masks(table, space_of(2))
    choices = torch.zeros(2, NUM_HEADS, dtype=torch.int64)
    choices[:, Head.OP] = LifecycleOp.GERMINATE
    with pytest.raises(EmptyMaskError, match=r"slot of environment 1 .*EMBARGOED, TRAINING"):
        masks.check(Head.SLOT, masks.of_head(Head.SLOT, choices))


@given(
    rng_seed=st.integers(0, 2**32 - 1),
    num_slots=st.sampled_from([1, 2, 3, 4, 5, 8]),
    auto_forward=st.booleans(),
    max_seeds=st.integers(0, 3),
)
@settings(max_examples=30)
def test_actions_sampled_under_the_masks_are_legal_and_canonical(
    rng_seed: int, num_slots: int, auto_forward: bool, max_seeds: int
) -> None:
    rng = np.random.default_rng(rng_seed)
    table = random_table(rng, 6, num_slots)
    space = space_of(num_slots, auto_forward=auto_forward, max_seeds=max_seeds)
    masks = compute_batch_masks(table, space)
    np.testing.assert_array_equal(masks.slot_by_op.numpy(), legal_slots_by_op(table, space.rules))
    actions = uniform_actions(masks, torch.from_numpy(rng.random((6, NUM_HEADS))))
    assert_legal(actions.numpy(), table, space)
    assert_canonical(actions.numpy(), table)


@pytest.mark.parametrize("num_slots", [1, 3, 8])
def test_mask_of_a_head_has_one_column_per_value_of_the_head(num_slots: int) -> None:
    masks = compute_batch_masks(SlotTable.empty(2, num_slots), space_of(num_slots))
    waiting = torch.from_numpy(np.tile(CANONICAL_ACTION, (2, 1)))
    widths = [masks.of_head(head, waiting).expand(2, -1).shape for head in Head]
    assert widths == [(2, size) for size in head_sizes(num_slots)]
