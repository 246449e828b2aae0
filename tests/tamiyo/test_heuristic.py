from typing import Any

import pytest

from esper.leyline import (
    OP_ADVANCE,
    OP_FOSSILIZE,
    OP_GERMINATE,
    OP_PRUNE,
    OP_WAIT,
    ActionSpace,
    AlphaSpeed,
    EpochFacts,
    EsperError,
    Head,
    SlotTable,
    Stage,
    Style,
    Tempo,
)
from esper.tamiyo import HeuristicController, HeuristicSettings
from esper.tamiyo.heuristic_settings import default_rotation
from tests.leyline.building import TRANSFORMER, env_facts, facts_of, put, space_of

HELD = {"age": 9, "alpha": 1.0, "alpha_target": 1.0, "blueprint": 7, "epochs_in_stage": 2}
LATE = 19
"""An epoch (of 20) at which no seed is planted any more, so that other rules show."""


def decide(
    table: SlotTable, epoch: int = LATE, space: ActionSpace | None = None, **settings: Any
) -> list[int]:
    """The action of a fresh controller in a one-environment table."""
    space = space or space_of(table.num_slots)
    controller = HeuristicController(space, 1, HeuristicSettings(**settings))
    return controller.decide(facts_of(epoch), table)[0].tolist()


def held(contribution: float, error: float = 1.0, **columns: Any) -> SlotTable:
    """Three slots, the middle one held."""
    table = SlotTable.empty(1, 3)
    columns = {**HELD, "contribution": contribution, "contribution_error": error, **columns}
    put(table, 1, Stage.HOLDING, **columns)
    return table


def test_what_contributes_for_sure_is_fossilized() -> None:
    assert decide(held(2.0)) == [OP_FOSSILIZE, 1, 0, 0, 1, 2, 0, 0]  # 2 − 1.96 > 0
    assert decide(held(1.9))[0] == OP_WAIT  # 1.9 − 1.96 < 0
    assert decide(held(float("nan"), float("nan")))[0] == OP_WAIT, "unknown is no verdict"


def test_what_hurts_for_sure_is_pruned() -> None:
    assert decide(held(-2.0)) == [OP_PRUNE, 1, 0, 0, 1, 2, 0, 0]  # −2 + 1.96 < 0
    assert decide(held(-1.9))[0] == OP_WAIT


def test_a_parked_seed_is_judged_and_a_moving_one_is_not() -> None:
    table = held(-5.0)
    put(table, 1, Stage.BLENDING, alpha=0.5, ramp_epochs=3, ramp_elapsed=3)
    assert decide(table)[:2] == [OP_PRUNE, 1]
    table.ramp_elapsed[0, 1] = 2
    assert decide(table)[0] == OP_WAIT


def test_prune_asks_legality() -> None:
    assert decide(held(-2.0, age=2))[0] == OP_WAIT, "min_prune_age is 3"
    assert decide(held(-2.0, leaving=True))[0] == OP_WAIT


def test_the_best_is_fossilized_first_and_the_worst_pruned_first() -> None:
    table = SlotTable.empty(1, 4)
    for slot, contribution in enumerate([3.0, 8.0, -3.0, -8.0]):
        put(table, slot, Stage.HOLDING, contribution=contribution, contribution_error=0.1, **HELD)
    assert decide(table)[:2] == [OP_FOSSILIZE, 1]
    table.stage[0, 1] = Stage.FOSSILIZED
    assert decide(table)[:2] == [OP_FOSSILIZE, 0]
    table.stage[0, 0] = Stage.FOSSILIZED
    assert decide(table)[:2] == [OP_PRUNE, 3]


def test_under_strict_rules_only_what_the_gate_lets_pass_is_fossilized() -> None:
    strict = space_of(strict_fossilize=True, min_contribution=1.0)
    assert decide(held(2.5), space=strict)[0] == OP_WAIT  # lower bound 0.54 < 1
    assert decide(held(3.0), space=strict)[0] == OP_FOSSILIZE  # 1.04
    assert decide(held(2.5, epochs_in_stage=5), space=strict)[0] == OP_PRUNE, "stuck before the gate"


def test_a_seed_is_planted_and_the_order_of_rules_is_kept() -> None:
    assert decide(SlotTable.empty(1, 3), epoch=0) == [OP_GERMINATE, 1, 7, 0, 0, 2, 0, 0]
    assert decide(held(2.0), epoch=1)[0] == OP_FOSSILIZE
    assert decide(held(-2.0), epoch=1)[0] == OP_PRUNE
    assert decide(held(0.0), epoch=1)[:2] == [OP_GERMINATE, 0]


@pytest.mark.parametrize(
    ("tempo", "auto_forward", "last"),
    [
        (Tempo.FAST, True, 14),  # 20 − (2 incubation + 3 ramp + 1 to be judged)
        (Tempo.SLOW, True, 9),
        (Tempo.FAST, False, 13),  # GERMINATED lasts an epoch
    ],
)
def test_nothing_is_planted_that_could_not_be_judged(tempo: Tempo, auto_forward: bool, last: int) -> None:
    space, table = space_of(auto_forward=auto_forward), SlotTable.empty(1, 3)
    assert decide(table, epoch=last, space=space, tempo=tempo)[0] == OP_GERMINATE
    assert decide(table, epoch=last + 1, space=space, tempo=tempo)[0] == OP_WAIT


def test_without_auto_forward_the_heuristic_moves_seeds_on() -> None:
    space, table = space_of(auto_forward=False), SlotTable.empty(1, 3)
    put(table, 2, Stage.GERMINATED)
    assert decide(table, epoch=1, space=space)[:2] == [OP_ADVANCE, 2]
    assert decide(table, epoch=1)[0] == OP_GERMINATE, "with auto-forward there is nothing to do"


# Every setting matters.


def test_setting_patience() -> None:
    controller = HeuristicController(space_of(), 1, HeuristicSettings(patience=2))
    table = SlotTable.empty(1, 3)
    scores = [50.0, 60.0, 60.1, 60.2, 70.0]  # plateau: 0, 0, 1, 2, 0
    ops = [controller.decide(facts_of(e, score=s), table)[0, Head.OP] for e, s in enumerate(scores)]
    assert ops == [OP_WAIT, OP_WAIT, OP_WAIT, OP_GERMINATE, OP_WAIT]


def test_setting_rotation() -> None:
    assert decide(SlotTable.empty(1, 3), epoch=0, rotation=("norm", "conv_heavy"))[Head.BLUEPRINT] == 3
    with pytest.raises(EsperError, match="unknown blueprint 'mlp'"):
        decide(SlotTable.empty(1, 3), rotation=("mlp",))


def test_the_default_rotation_is_strongest_first() -> None:
    cnn = space_of()
    names = [cnn.blueprint_names[index] for index in default_rotation(cnn)]
    assert names == [
        *("conv_heavy", "conv_light", "bottleneck", "depthwise", "norm", "conv_small", "attention"),
    ]
    transformer = space_of(blueprints=TRANSFORMER)
    names = [cnn.blueprint_names[index] for index in default_rotation(transformer)]
    assert names == ["mlp", "attention", "mlp_small", "lora_large", "flex_attention", "lora", "norm"]
    assert default_rotation(space_of(blueprints=(3, 4, 11))) == (4, 3, 11), "the unranked come last"


class Life:
    """Eight slots in which what the controller plants comes about; a norm sits in slot 0."""

    def __init__(self, **settings: Any) -> None:
        settings = {"rotation": ("norm", "conv_heavy"), **settings}
        self.controller = HeuristicController(space_of(8), 1, HeuristicSettings(**settings))
        self.table = SlotTable.empty(1, 8)
        put(self.table, 0, Stage.TRAINING, blueprint=3)

    def plant(self, epoch: int) -> int:
        action = self.controller.decide(facts_of(epoch), self.table)[0]
        assert action[Head.OP] == OP_GERMINATE
        blueprint = int(action[Head.BLUEPRINT])
        put(self.table, int(action[Head.SLOT]), Stage.TRAINING, blueprint=blueprint)
        return blueprint

    def lose(self, slot: int) -> None:
        self.table.clear(0, slot)
        put(self.table, slot, Stage.EMBARGOED)


def test_setting_rotate() -> None:
    stay, turn = Life(), Life(rotate=True)
    assert [stay.plant(epoch) for epoch in range(3)] == [3, 3, 3]
    assert [turn.plant(epoch) for epoch in range(3)] == [3, 7, 3]


@pytest.mark.parametrize(("steps", "expected"), [(0, [3, 3, 3, 3]), (2, [7, 7, 3, 3]), (3, [7, 7, 7, 3])])
def test_setting_penalty_steps(steps: int, expected: list[int]) -> None:
    life = Life(penalty_steps=steps)
    life.plant(0)
    life.lose(0)
    assert [life.plant(epoch) for epoch in range(1, 5)] == expected


def test_penalties_add_up() -> None:
    life = Life(penalty_steps=2)
    put(life.table, 1, Stage.TRAINING, blueprint=3)
    life.plant(0)
    life.lose(0)
    life.lose(1)
    assert [life.plant(epoch) for epoch in range(1, 6)] == [7, 7, 7, 7, 3]


def test_a_seed_on_its_way_out_counts_once() -> None:
    life = Life(penalty_steps=2)
    put(life.table, 0, Stage.BLENDING, alpha=1.0, ramp_epochs=3)
    life.plant(0)
    life.table.leaving[0, 0] = True
    assert life.plant(1) == 7
    life.lose(0)
    assert [life.plant(2), life.plant(3)] == [7, 3]


def test_a_germination_that_does_not_come_about_is_not_tried_for_ever() -> None:
    life = Life()
    before = life.table.copy()
    assert life.plant(0) == 3
    life.table.assign(before)
    assert life.plant(1) == 7


def test_a_fossil_is_no_loss() -> None:
    life = Life()
    life.plant(0)
    life.table.stage[0, 0] = Stage.FOSSILIZED
    assert life.plant(1) == 3


@pytest.mark.parametrize("restart", ["reset", "epoch 0"])
def test_a_new_life_begins_without_penalties_or_turns(restart: str) -> None:
    life = Life(rotate=True)
    life.plant(0)
    life.lose(0)
    life.plant(1)
    if restart == "reset":
        life.controller.reset(1)
    for slot in range(8):
        life.table.clear(0, slot)
    assert life.plant(0) == 3
    assert life.plant(1) == 7


def test_environments_do_not_mix() -> None:
    controller = HeuristicController(space_of(1), 2, HeuristicSettings(rotation=("norm", "conv_heavy")))
    table = SlotTable.empty(2, 1)
    put(table, 0, Stage.TRAINING, env=0, blueprint=3)
    put(table, 0, Stage.HOLDING, env=1, contribution=9.0, contribution_error=0.1, **HELD)
    first = controller.decide(facts_of(0, num_envs=2), table)
    assert first[:, Head.OP].tolist() == [OP_WAIT, OP_FOSSILIZE]
    table.clear(0, 0)
    table.clear(1, 0)
    facts = EpochFacts.stack([env_facts(1), env_facts(0)])  # the second began a new life
    assert controller.decide(facts, table)[:, Head.BLUEPRINT].tolist() == [7, 3]


@pytest.mark.parametrize(
    ("order", "slots"),
    [
        ("upstream_first", [0, 1, 2, 3, 4]),
        ("downstream_first", [4, 3, 2, 1, 0]),
        ("middle_first", [2, 1, 3, 0, 4]),
    ],
)
def test_setting_slot_order(order: str, slots: list[int]) -> None:
    table = SlotTable.empty(1, 5)
    planted = []
    for _ in range(5):
        planted.append(decide(table, epoch=0, slot_order=order)[Head.SLOT])
        put(table, planted[-1], Stage.TRAINING)
    assert planted == slots


def test_the_middle_is_that_of_the_enabled_slots() -> None:
    table = SlotTable.empty(1, 8)
    table.enabled[0, 3:] = False
    assert decide(table, epoch=0)[Head.SLOT] == 1


def test_an_unknown_slot_order_is_refused() -> None:
    with pytest.raises(EsperError, match="unknown slot order 'middle'; did you mean middle_first"):
        HeuristicSettings(slot_order="middle")  # type: ignore[arg-type]


def test_setting_style() -> None:
    assert decide(SlotTable.empty(1, 3), epoch=0, style=Style.GATED_GATE)[Head.STYLE] == 3


def test_setting_tempo() -> None:
    assert decide(SlotTable.empty(1, 3), epoch=0, tempo=Tempo.SLOW)[Head.TEMPO] == 2


def test_setting_confidence_z() -> None:
    assert decide(held(1.5), confidence_z=1.0)[0] == OP_FOSSILIZE
    assert decide(held(-1.5), confidence_z=1.0)[0] == OP_PRUNE
    assert decide(held(2.5), confidence_z=3.0)[0] == OP_WAIT


def test_setting_fossilize_above() -> None:
    assert decide(held(2.5), fossilize_above=0.5)[0] == OP_FOSSILIZE  # lower bound 0.54
    assert decide(held(2.5), fossilize_above=0.6)[0] == OP_WAIT


def test_setting_prune_below() -> None:
    assert decide(held(-2.5), prune_below=-0.5)[0] == OP_PRUNE  # upper bound −0.54
    assert decide(held(-2.5), prune_below=-0.6)[0] == OP_WAIT


def test_setting_judge_epochs() -> None:
    assert decide(held(-5.0, epochs_in_stage=2), judge_epochs=2)[0] == OP_PRUNE
    assert decide(held(-5.0, epochs_in_stage=2), judge_epochs=3)[0] == OP_WAIT
    assert decide(held(5.0, epochs_in_stage=0), judge_epochs=3)[0] == OP_FOSSILIZE, "good news need not wait"


@pytest.mark.parametrize(("contribution", "op"), [(0.5, OP_FOSSILIZE), (0.0, OP_PRUNE), (-0.5, OP_PRUNE)])
def test_setting_stuck_epochs_ends_an_open_verdict(contribution: float, op: int) -> None:
    assert decide(held(contribution, epochs_in_stage=3), stuck_epochs=4)[0] == OP_WAIT
    assert decide(held(contribution, epochs_in_stage=4), stuck_epochs=4)[0] == op


def test_setting_stuck_epochs_is_counted_from_the_end_of_a_stage() -> None:
    table = SlotTable.empty(1, 1)
    put(table, 0, Stage.TRAINING, age=9, epochs_in_stage=5)  # incubation 2
    assert decide(table, stuck_epochs=3)[0] == OP_PRUNE
    assert decide(table, stuck_epochs=4)[0] == OP_WAIT
    put(table, 0, Stage.BLENDING, alpha=0.5, ramp_epochs=3, ramp_elapsed=3, epochs_in_stage=5)
    assert decide(table, stuck_epochs=2)[0] == OP_PRUNE
    assert decide(table, stuck_epochs=3)[0] == OP_WAIT


def test_a_held_seed_that_was_never_measured_is_not_stuck() -> None:
    assert decide(held(float("nan"), float("nan"), epochs_in_stage=15))[0] == OP_WAIT


def test_setting_prune_speed() -> None:
    assert decide(held(-5.0), prune_speed=AlphaSpeed.SLOW)[Head.ALPHA_SPEED] == 3
    assert decide(held(-5.0))[Head.ALPHA_SPEED] == 0
