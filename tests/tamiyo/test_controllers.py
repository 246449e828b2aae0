from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline import Controller, EpochFacts, Head, LifecycleOp, SlotTable, Stage
from esper.leyline.slot_table import IntArray
from esper.tamiyo import (
    HeuristicController,
    HeuristicSettings,
    OffController,
    PeriodicController,
    RandomController,
    parse_plan,
)
from tests.leyline.building import TRANSFORMER, assert_legal, env_facts, facts_of, put, random_table, space_of
from tests.tamiyo.policy.small_policies import busy_table

WAIT = [0, 0, 0, 0, 1, 2, 0, 0]


def test_off_controller_waits_in_every_environment() -> None:
    controller = OffController(space_of(4))
    assert controller.decide(facts_of(num_envs=2), busy_table(2)).actions.tolist() == [WAIT, WAIT]


def test_random_controller_draws_legal_ops_uniformly() -> None:
    controller = RandomController(space_of(4, auto_forward=False), rng_seed=0, env_indices=range(600))
    table = busy_table(600)
    actions = controller.decide(facts_of(num_envs=600), table).actions
    ops = Counter(actions[:, Head.OP].tolist())
    # Each legal op is expected 100 times in 600 draws, with standard deviation sqrt(600 · 1/6 · 5/6) = 9.
    assert set(ops) == set(LifecycleOp)
    assert all(60 < count < 140 for count in ops.values())


def test_random_controller_draws_every_value_of_heads_that_the_op_reads() -> None:
    space = space_of(4, blueprints=TRANSFORMER)
    controller = RandomController(space, rng_seed=0, env_indices=range(2000))
    actions = controller.decide(facts_of(num_envs=2000), busy_table(2000)).actions

    def values(op: int, head: Head) -> list[int]:
        return np.unique(actions[actions[:, Head.OP] == op, head]).tolist()

    assert values(LifecycleOp.GERMINATE, Head.SLOT) == [0, 3]
    assert values(LifecycleOp.GERMINATE, Head.BLUEPRINT) == [2, 3, 8, 9, 10, 11, 12]
    assert values(LifecycleOp.GERMINATE, Head.STYLE) == [0, 1, 2, 3]
    assert values(LifecycleOp.GERMINATE, Head.TEMPO) == [0, 1, 2]
    assert values(LifecycleOp.GERMINATE, Head.ALPHA_TARGET) == [0, 1, 2]
    assert values(LifecycleOp.GERMINATE, Head.ALPHA_SPEED) == [0]
    assert values(LifecycleOp.SET_ALPHA_TARGET, Head.SLOT) == [1]
    assert values(LifecycleOp.SET_ALPHA_TARGET, Head.ALPHA_TARGET) == [0, 1, 2]
    assert values(LifecycleOp.PRUNE, Head.SLOT) == [1, 2]
    assert values(LifecycleOp.PRUNE, Head.ALPHA_SPEED) == [0, 1, 2, 3]
    assert values(LifecycleOp.PRUNE, Head.ALPHA_CURVE) == [0, 1, 2, 3, 4]
    assert values(LifecycleOp.ADVANCE, Head.SLOT) == [], "auto-forward is on"


def play(controller: RandomController, num_envs: int, steps: int = 12) -> list[IntArray]:
    table = busy_table(num_envs)
    return [controller.decide(facts_of(num_envs=num_envs), table).actions for _ in range(steps)]


def test_random_actions_of_an_environment_do_not_depend_on_other_environments() -> None:
    space = space_of(4)
    alone = np.array(play(RandomController(space, 5, [3]), 1))[:, 0]
    among = np.array(play(RandomController(space, 5, [0, 1, 2, 3, 4]), 5))
    np.testing.assert_array_equal(among[:, 3], alone)
    assert not np.array_equal(among[:, 2], alone), "environments have different streams"


def test_random_actions_differ_by_episode_and_repeat_after_reset() -> None:
    controller = RandomController(space_of(4), 5, [0])
    first = np.array(play(controller, 1))
    controller.reset(1)
    second = np.array(play(controller, 1))
    controller.reset(0)
    np.testing.assert_array_equal(np.array(play(controller, 1)), first)
    assert not np.array_equal(second, first)
    assert not np.array_equal(np.array(play(RandomController(space_of(4), 6, [0]), 1)), first)


def test_periodic_controller_germinates_at_the_planned_step() -> None:
    space = space_of()
    controller = PeriodicController(space, parse_plan("conv_heavy/slow/half@r0c1:1", space))
    table = SlotTable.empty(1, 3)
    germinate = [LifecycleOp.GERMINATE, 1, 7, 0, 2, 0, 0, 0]
    actions = [controller.decide(facts_of(epoch), table).actions.tolist()[0] for epoch in range(3)]
    assert actions == [WAIT, germinate, WAIT]
    put(table, 1, Stage.TRAINING)
    assert controller.decide(facts_of(1), table).actions.tolist() == [WAIT], "the slot is occupied"


def test_periodic_controller_reads_its_plan_at_the_epoch_of_each_environment() -> None:
    space = space_of()
    controller = PeriodicController(space, parse_plan("norm@r0c0:4", space))
    facts = EpochFacts.stack([env_facts(4), env_facts(0)])
    assert controller.decide(facts, SlotTable.empty(2, 3)).actions[:, Head.OP].tolist() == [
        LifecycleOp.GERMINATE,
        LifecycleOp.WAIT,
    ]


def test_periodic_controller_fossilizes_seeds_in_steps_without_a_planned_germination() -> None:
    space = space_of(4)
    controller = PeriodicController(space, parse_plan("every:2:norm", space))
    table = busy_table()
    assert controller.decide(facts_of(0), table).actions[0, Head.OP] == LifecycleOp.GERMINATE
    assert controller.decide(facts_of(1), table).actions[0, :2].tolist() == [LifecycleOp.FOSSILIZE, 1]


def test_periodic_controller_uses_the_op_advance_if_auto_forward_is_off() -> None:
    space = space_of(auto_forward=False, min_training_epochs=2)
    controller = PeriodicController(space, parse_plan("norm@r0c0:0", space))
    table = SlotTable.empty(1, 3)
    put(table, 1, Stage.TRAINING, epochs_in_stage=1)
    assert controller.decide(facts_of(1), table).actions[0, Head.OP] == LifecycleOp.WAIT
    table.epochs_in_stage[0, 1] = 2
    assert controller.decide(facts_of(1), table).actions[0, :2].tolist() == [LifecycleOp.ADVANCE, 1]
    put(table, 1, Stage.BLENDING, alpha=0.8, alpha_target=1.0, ramp_epochs=3, ramp_elapsed=2)
    assert controller.decide(facts_of(1), table).actions[0, Head.OP] == LifecycleOp.WAIT
    put(table, 1, Stage.BLENDING, alpha=1.0, alpha_target=1.0, ramp_epochs=3, ramp_elapsed=3)
    assert controller.decide(facts_of(1), table).actions[0, :2].tolist() == [LifecycleOp.ADVANCE, 1]
    put(table, 1, Stage.BLENDING, alpha=0.5, alpha_target=0.5, ramp_epochs=3, ramp_elapsed=3)
    assert controller.decide(facts_of(1), table).actions[0, Head.OP] == LifecycleOp.WAIT, (
        "parked: gate G3 would refuse"
    )
    put(table, 1, Stage.GERMINATED)
    assert controller.decide(facts_of(1), table).actions[0, :2].tolist() == [LifecycleOp.ADVANCE, 1]


def everyone(num_slots: int, num_envs: int, **rules: object) -> list[Controller]:
    space = space_of(num_slots, **rules)
    eager = HeuristicSettings(stuck_epochs=1)
    return [
        OffController(space),
        RandomController(space, 0, range(num_envs)),
        PeriodicController(space, parse_plan("every:1", space)),
        PeriodicController(space, parse_plan("norm@r0c0:0,conv_heavy@r0c0:1", space)),
        HeuristicController(space, num_envs),
        HeuristicController(space, num_envs, eager),
    ]


def test_all_controllers_satisfy_the_controller_protocol_and_have_a_name() -> None:
    makers = everyone(3, 1)
    assert all(isinstance(maker, Controller) for maker in makers)
    assert [maker.name for maker in makers] == ["off", "random", *["periodic"] * 2, *["heuristic"] * 2]


@given(
    rng_seed=st.integers(0, 2**32 - 1),
    num_slots=st.sampled_from([1, 2, 3, 4, 5, 8]),
    auto_forward=st.booleans(),
    max_seeds=st.integers(0, 3),
    strict=st.booleans(),
)
@settings(max_examples=25)
def test_no_controller_takes_an_illegal_action_or_changes_the_slot_table(
    rng_seed: int, num_slots: int, auto_forward: bool, max_seeds: int, strict: bool
) -> None:
    rules = {"auto_forward": auto_forward, "max_seeds": max_seeds, "strict_fossilize": strict}
    rng = np.random.default_rng(rng_seed)
    for maker in everyone(num_slots, 4, **rules):
        maker.reset(0)
        for epoch in range(4):
            table = random_table(rng, 4, num_slots)
            before = table.copy()
            actions = maker.decide(facts_of(epoch, num_envs=4), table).actions
            assert_legal(actions, table, space_of(num_slots, **rules))
            for name, array in table.arrays().items():
                np.testing.assert_array_equal(
                    array, before.arrays()[name], err_msg="decide must not change the table"
                )
