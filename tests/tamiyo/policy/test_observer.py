"""Observations of models with fewer slots than the capacity of the policy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline import NUM_HEADS, Head, SlotTable
from esper.tamiyo.policy.action_masks import compute_batch_masks
from esper.tamiyo.policy.controller import decide
from esper.tamiyo.policy.features import (
    BASE_SIZE,
    SLOT_SIZE,
    CapacityError,
    Observer,
    batch_obs_to_features,
    check_capacity,
    feature_names,
)
from esper.tamiyo.tracker import SignalTracker
from tests.leyline.building import assert_legal, facts_of, random_table, space_of
from tests.tamiyo.policy.small_policies import policy_of

ENVS = 5


def random_episodes(rng_seed: int, num_slots: int) -> SlotTable:
    return random_table(np.random.default_rng(rng_seed), ENVS, num_slots)


def test_observation_is_not_padded_if_the_model_has_the_policys_capacity() -> None:
    table, space = random_episodes(0, 3), space_of(3, auto_forward=False)
    facts = facts_of(4, num_envs=ENVS)
    seen = Observer(ENVS, 3, 3).observe(facts, table, space)
    features, blueprints = batch_obs_to_features(SignalTracker(ENVS).update(facts), table, space.slot_config)
    assert torch.equal(seen.features, features)
    assert torch.equal(seen.blueprint_indices, blueprints)
    assert torch.equal(seen.masks.slot_by_op, compute_batch_masks(table, space).slot_by_op)


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.sampled_from([(1, 2), (1, 8), (3, 4), (3, 8), (5, 8)]))
def test_padded_slots_are_empty_and_have_no_legal_op(rng_seed: int, sizes: tuple[int, int]) -> None:
    slots, capacity = sizes
    table, space = random_episodes(rng_seed, slots), space_of(slots, auto_forward=False)
    facts = facts_of(4, num_envs=ENVS)
    narrow = Observer(ENVS, slots, slots).observe(facts, table, space)
    wide = Observer(ENVS, slots, capacity).observe(facts, table, space)
    assert wide.features.shape == (ENVS, BASE_SIZE + SLOT_SIZE * capacity)
    present = BASE_SIZE + SLOT_SIZE * slots
    assert not wide.features[:, present:].any()
    assert (wide.blueprint_indices[:, slots:] == -1).all()
    own = [column for column, name in enumerate(feature_names(slots)) if not name.startswith(SHARES)]
    assert torch.equal(wide.features[:, own], narrow.features[:, own])
    assert torch.equal(wide.blueprint_indices[:, :slots], narrow.blueprint_indices)
    assert torch.equal(wide.masks.slot_by_op[..., :slots], narrow.masks.slot_by_op)
    assert not wide.masks.slot_by_op[..., slots:].any()
    assert torch.equal(wide.masks.blueprint, narrow.masks.blueprint)


SHARES = ("slot_use", "share_")
"""Prefixes of feature names; these features are numbers of slots divided by the policy's capacity."""


def test_feature_slot_use_is_halved_if_the_policys_capacity_is_twice_the_number_of_slots() -> None:
    table, facts = random_episodes(1, 3), facts_of(4, num_envs=ENVS)
    column = feature_names(3).index("slot_use")
    shares = [
        Observer(ENVS, 3, capacity).observe(facts, table, space_of(3)).features[:, column]
        for capacity in (3, 6)
    ]
    assert shares[0].any()
    torch.testing.assert_close(shares[1], shares[0] / 2)


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.sampled_from([1, 2, 3, 5]))
def test_policy_decisions_never_choose_a_padded_slot(rng_seed: int, slots: int) -> None:
    table, space = random_episodes(rng_seed, slots), space_of(slots, auto_forward=False)
    policy = POLICY_FOR_EIGHT
    seen = Observer(ENVS, slots, 8).observe(facts_of(4, num_envs=ENVS), table, space)
    sampled = torch.rand(ENVS, NUM_HEADS, generator=torch.Generator().manual_seed(rng_seed))
    for uniforms in (None, sampled):
        actions = decide(policy, seen, policy.get_initial_hidden(ENVS), uniforms).actions.numpy()
        assert actions[:, Head.SLOT].max() < slots
        assert_legal(actions, table, space)


POLICY_FOR_EIGHT = policy_of(8)


def test_padded_observation_does_not_depend_on_the_previous_slot_table() -> None:
    space, observer = space_of(3, auto_forward=False), Observer(ENVS, 3, 8)
    for step in range(4):
        table, facts = random_episodes(step, 3), facts_of(step, num_envs=ENVS)
        seen, fresh = observer.observe(facts, table, space), Observer(ENVS, 3, 8).observe(facts, table, space)
        assert torch.equal(seen.features[:, BASE_SIZE:], fresh.features[:, BASE_SIZE:])
        assert torch.equal(seen.blueprint_indices, fresh.blueprint_indices)
        assert torch.equal(seen.masks.slot_by_op, fresh.masks.slot_by_op)


def test_observation_does_not_change_when_the_next_observation_is_computed() -> None:
    space, observer = space_of(3, auto_forward=False), Observer(ENVS, 3, 8)
    first = observer.observe(facts_of(0, num_envs=ENVS), random_episodes(0, 3), space)
    kept = first.features.clone(), first.blueprint_indices.clone(), first.masks.slot_by_op.clone()
    observer.observe(facts_of(1, num_envs=ENVS), random_episodes(1, 3), space)
    assert torch.equal(first.features, kept[0])
    assert torch.equal(first.blueprint_indices, kept[1])
    assert torch.equal(first.masks.slot_by_op, kept[2])


def test_reset_clears_the_trends_of_the_observer() -> None:
    table, space, observer = random_episodes(0, 3), space_of(3), Observer(ENVS, 3, 8)
    fresh = observer.observe(facts_of(3, loss=1.0, num_envs=ENVS), table, space).features
    observer.observe(facts_of(4, loss=9.0, num_envs=ENVS), table, space)
    later = observer.observe(facts_of(3, loss=1.0, num_envs=ENVS), table, space).features
    observer.reset()
    again = observer.observe(facts_of(3, loss=1.0, num_envs=ENVS), table, space).features
    assert torch.equal(again, fresh)
    assert not torch.equal(later, fresh)


def test_model_with_more_slots_than_the_policys_capacity_raises_capacity_error() -> None:
    sentence = (
        "a policy with room for 3 slots cannot serve a host with 4; train one with --capacity 4 or more"
    )
    with pytest.raises(CapacityError, match=sentence):
        Observer(1, 4, 3)
    with pytest.raises(CapacityError, match=sentence):
        check_capacity(4, 3)
    check_capacity(3, 3)
