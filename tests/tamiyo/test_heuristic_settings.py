"""One test per field of ``HeuristicSettings``, named after the field."""

from dataclasses import fields, replace

import pytest

from esper.leyline import BLUEPRINT_IDS, EsperError, Head, LifecycleOp, SlotTable, Stage
from esper.tamiyo import HeuristicController, HeuristicSettings
from esper.tamiyo.heuristic import default_rotation
from tests.contracts.matrix import begin
from tests.leyline.building import CNN, TRANSFORMER, assert_legal, facts_of, put, space_of
from tests.tamiyo.heuristic_episodes import Episode, decide, held


def test_setting_patience_delays_germination_until_a_plateau() -> None:
    controller = HeuristicController(space_of(), 1, HeuristicSettings(patience=2))
    table = SlotTable.empty(1, 3)
    # The number of successive epochs without enough score gain is 0, 0, 1, 2 and 0 after the five epochs.
    scores = [50.0, 60.0, 60.1, 60.2, 70.0]
    ops = [controller.decide(facts_of(e, score=s), table).actions[0, Head.OP] for e, s in enumerate(scores)]
    assert ops == [
        LifecycleOp.WAIT,
        LifecycleOp.WAIT,
        LifecycleOp.WAIT,
        LifecycleOp.GERMINATE,
        LifecycleOp.WAIT,
    ]


def test_setting_rotation_is_the_order_in_which_the_heuristic_tries_blueprints() -> None:
    assert decide(SlotTable.empty(1, 3), epoch=0, rotation=("norm", "conv_heavy"))[Head.BLUEPRINT] == 3
    with pytest.raises(EsperError, match="unknown blueprint 'mlp'"):
        decide(SlotTable.empty(1, 3), rotation=("mlp",))


def test_default_order_of_blueprints_of_the_heuristic_is_as_specified_for_images_and_tokens() -> None:
    cnn = space_of()
    names = [cnn.blueprint_names[index] for index in default_rotation(cnn)]
    assert names == [
        *("conv_heavy", "conv_light", "bottleneck", "depthwise", "norm", "conv_small", "attention")
    ]
    transformer = space_of(blueprints=TRANSFORMER)
    names = [cnn.blueprint_names[index] for index in default_rotation(transformer)]
    assert names == ["mlp", "attention", "mlp_small", "lora_large", "flex_attention", "lora", "norm"]
    assert default_rotation(space_of(blueprints=(3, 4, 11))) == (4, 3, 11), (
        "blueprints without a rank come last"
    )


def test_user_blueprint_does_not_change_the_order_of_built_in_blueprints() -> None:
    # A user's blueprint on a token host gets index 1, which is conv_light on image hosts.
    names = ("noop", "mine", *BLUEPRINT_IDS[2:])
    space = replace(space_of(blueprints=(1, *TRANSFORMER)), blueprint_names=names)
    assert default_rotation(space) == (11, 2, 10, 9, 12, 8, 3, 1)


@pytest.mark.parametrize("blueprints", [CNN, TRANSFORMER], ids=["feature_map", "tokens"])
def test_every_blueprint_is_tried_once_before_a_failed_blueprint_is_repeated(
    blueprints: tuple[int, ...],
) -> None:
    space = space_of(1, blueprints)
    heuristic = HeuristicController(space, 1)
    # The slot table stays empty, as if every seed were removed in its first epoch.
    table = SlotTable.empty(1, 1)
    tried = []
    for epoch in range(8):
        action = heuristic.decide(facts_of(epoch), table).actions
        assert_legal(action, table, space)
        tried.append(int(action[0, Head.BLUEPRINT]))
    assert tried == [*default_rotation(space), tried[0]]


def test_blueprints_that_do_not_fit_the_host_are_not_in_the_rotation() -> None:
    space = begin("tokens", 6).model.action_space
    names = [space.blueprint_names[index] for index in default_rotation(space)]
    assert names[:5] == ["mlp", "mlp_small", "lora_large", "lora", "norm"]
    assert not {"attention", "flex_attention"} & set(names), "width 6 is not divisible by four heads"
    assert set(default_rotation(space)) == set(space.blueprints)


@pytest.mark.parametrize(("steps", "expected"), [(0, [3, 3, 3, 3]), (2, [7, 7, 3, 3]), (3, [7, 7, 7, 3])])
def test_setting_penalty_steps_postpones_the_blueprint_of_a_removed_seed(
    steps: int, expected: list[int]
) -> None:
    episode = Episode(penalty_steps=steps)
    episode.plant(0)
    episode.lose(0)
    assert [episode.plant(epoch) for epoch in range(1, 5)] == expected


def test_heuristic_germinates_in_middle_slots_first() -> None:
    table = SlotTable.empty(1, 5)
    planted = []
    for _ in range(5):
        planted.append(decide(table, epoch=0)[Head.SLOT])
        put(table, planted[-1], Stage.TRAINING)
    assert planted == [2, 1, 3, 0, 4]


def test_middle_slot_is_the_middle_of_the_enabled_slots() -> None:
    table = SlotTable.empty(1, 8)
    table.enabled[0, 3:] = False
    assert decide(table, epoch=0)[Head.SLOT] == 1


def test_seed_in_holding_is_fossilized_at_once_but_pruned_only_after_one_epoch() -> None:
    assert decide(held(-5.0, epochs_in_stage=0))[0] == LifecycleOp.WAIT
    assert decide(held(-5.0, epochs_in_stage=1))[0] == LifecycleOp.PRUNE
    assert decide(held(5.0, epochs_in_stage=0))[0] == LifecycleOp.FOSSILIZE


@pytest.mark.parametrize(
    ("contribution", "op"),
    [(0.5, LifecycleOp.FOSSILIZE), (0.0, LifecycleOp.PRUNE), (-0.5, LifecycleOp.PRUNE)],
)
def test_setting_stuck_epochs_is_the_time_in_holding_after_which_the_sign_of_the_contribution_decides(
    contribution: float, op: int
) -> None:
    assert decide(held(contribution, epochs_in_stage=3), stuck_epochs=4)[0] == LifecycleOp.WAIT
    assert decide(held(contribution, epochs_in_stage=4), stuck_epochs=4)[0] == op


def test_setting_stuck_epochs_is_counted_from_the_epoch_in_which_the_stage_should_have_ended() -> None:
    table = SlotTable.empty(1, 1)
    # The regular length of stage TRAINING is 2 epochs.
    put(table, 0, Stage.TRAINING, age=9, epochs_in_stage=5)
    assert decide(table, stuck_epochs=3)[0] == LifecycleOp.PRUNE
    assert decide(table, stuck_epochs=4)[0] == LifecycleOp.WAIT
    put(table, 0, Stage.BLENDING, alpha=0.5, ramp_epochs=3, ramp_elapsed=3, epochs_in_stage=5)
    assert decide(table, stuck_epochs=2)[0] == LifecycleOp.PRUNE
    assert decide(table, stuck_epochs=3)[0] == LifecycleOp.WAIT


def test_seed_in_holding_without_measured_contribution_is_not_pruned_as_stuck() -> None:
    assert decide(held(float("nan"), float("nan"), epochs_in_stage=15))[0] == LifecycleOp.WAIT


def test_every_heuristic_setting_has_a_test() -> None:
    tests = " ".join(name for name in globals() if name.startswith("test_setting"))
    assert [field.name for field in fields(HeuristicSettings) if field.name not in tests] == []
