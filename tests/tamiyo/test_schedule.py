import re

import numpy as np
import pytest

from esper.leyline import AlphaTarget, BlueprintAction, EsperError, Style, Tempo
from esper.tamiyo import Rotation, Schedule, ScheduleEntry, SeedChoice, parse_plan
from tests.leyline.building import TRANSFORMER, space_of

HEAVY = SeedChoice(BlueprintAction.CONV_HEAVY)
FREE = np.ones(3, dtype=bool)
FORM = "blueprint@slot:step (for example conv_heavy@r0c0:0)"
STEP = "the step of schedule entry"
ALLOWED = "conv_light, attention, norm, depthwise, bottleneck, conv_small, conv_heavy"


def test_plan_with_steps_and_slots_is_parsed_from_text() -> None:
    plan = parse_plan("conv_heavy@r0c0:0, conv_heavy@r0c2:1,norm@r0c1:12", space_of())
    assert isinstance(plan, Schedule)
    assert plan.entries == (
        ScheduleEntry(0, 0, SeedChoice(7)),
        ScheduleEntry(1, 2, SeedChoice(7)),
        ScheduleEntry(12, 1, SeedChoice(3)),
    )


def test_seed_options_in_a_plan_are_parsed_in_any_order() -> None:
    plan = parse_plan("conv_heavy/half/gated_gate/slow@r0c0:0", space_of())
    assert isinstance(plan, Schedule)
    assert plan.entries[0].seed == SeedChoice(7, Style.GATED_GATE, Tempo.SLOW, AlphaTarget.HALF)
    assert SeedChoice(7) == SeedChoice(7, Style.LINEAR_ADD, Tempo.STANDARD, AlphaTarget.FULL)


def test_plan_of_a_germination_every_third_step_is_parsed_from_text() -> None:
    plan = parse_plan("every:3:conv_heavy,norm/fast", space_of())
    assert isinstance(plan, Rotation)
    assert (plan.period, plan.seeds) == (3, (SeedChoice(7), SeedChoice(3, tempo=Tempo.FAST)))


def test_periodic_plan_without_named_blueprints_uses_all_blueprints_of_the_host() -> None:
    plan = parse_plan("every:2", space_of(blueprints=TRANSFORMER))
    assert isinstance(plan, Rotation)
    assert [seed.blueprint for seed in plan.seeds] == [2, 3, 8, 9, 10, 11, 12]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", f"empty entry in schedule ''; write {FORM}, separated by commas"),
        ("norm@r0c0:0,", f"empty entry in schedule 'norm@r0c0:0,'; write {FORM}, separated by commas"),
        ("norm@r0c0", f"schedule entry 'norm@r0c0' does not read {FORM}"),
        ("norm@r0c0:soon", f"{STEP} 'norm@r0c0:soon' must be a whole number from 0; found 'soon'"),
        ("norm@r0c0:-1", f"{STEP} 'norm@r0c0:-1' must be a whole number from 0; found '-1'"),
        ("norm@r0c9:0", "slot 'r0c9' is not in this model; its slots are r0c0, r0c1, r0c2"),
        ("depthwize@r0c0:0", f"unknown blueprint 'depthwize'; did you mean depthwise? Allowed: {ALLOWED}."),
        ("noop@r0c0:0", f"unknown blueprint 'noop'; did you mean norm? Allowed: {ALLOWED}."),
        (
            "norm/fats@r0c0:0",
            "unknown seed option 'fats'; did you mean fast? Allowed: linear_add, linear_multiply,"
            " sigmoid_add, gated_gate, fast, standard, slow, half, seventy, full.",
        ),
        ("norm@r0c0:4,norm@r0c1:4", "a step has one action, but the schedule germinates twice at step 4"),
        ("every:0", "a rotation needs a period of at least 1 step; found 0"),
        ("every:often", "the period of 'every:often' must be a whole number from 0; found 'often'"),
        ("every:2:mlp", f"unknown blueprint 'mlp'. Allowed: {ALLOWED}."),
    ],
)
def test_invalid_plan_text_raises_with_an_explanation(text: str, sentence: str) -> None:
    with pytest.raises(EsperError, match=f"^{re.escape(sentence)}$"):
        parse_plan(text, space_of())


def test_periodic_plan_without_blueprints_raises_an_error() -> None:
    with pytest.raises(EsperError, match="at least one blueprint"):
        Rotation(2, ())


def test_plan_germinates_at_the_planned_step_if_the_planned_slot_is_free() -> None:
    plan = Schedule((ScheduleEntry(2, 1, HEAVY),))
    assert [plan.due(step, FREE) for step in range(4)] == [None, None, (1, HEAVY), None]
    assert plan.due(2, np.array([True, False, True])) is None


def test_periodic_plan_germinates_in_the_first_free_slot_once_per_period() -> None:
    norm = SeedChoice(BlueprintAction.NORM)
    plan = Rotation(2, (HEAVY, norm))
    due = [plan.due(step, FREE) for step in range(5)]
    assert due == [(0, HEAVY), None, (0, norm), None, (0, HEAVY)]
    assert plan.due(2, np.array([False, False, True])) == (2, norm)
    assert plan.due(2, ~FREE) is None
