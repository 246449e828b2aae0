"""Valid and invalid study files."""

import pytest

from esper.leyline.errors import EsperError
from esper.study.study_config import check_study, clock_plan, sizes_of
from esper.tolaria.tasks import task_named
from tests.study.building import TASK, study


def refused(**changes: object) -> str:
    with pytest.raises(EsperError) as found:
        check_study(study(**changes))
    return str(found.value)


def test_static_sizes_of_a_study_are_those_that_growth_can_reach():
    assert list(sizes_of(TASK)) == [1, 2, 3]
    assert list(sizes_of(TASK.with_slots(5).with_trunk(2))) == [2, 3, 4, 5, 6, 7]
    assert list(sizes_of(task_named("digits_impaired"))) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"arms": ["static:4"]},
         "'static:4' is a size that growth cannot reach on tiny_scaling; its sizes are 1 to 3"),
        ({"arms": ["static:x"]}, "'static:x' is a size that growth cannot reach"),
        ({"arms": {"off": "off", "grown": {"arm": "counting", "budget": "1G"}}},
         "arm 'grown' has a separate budget, 1G; all arms of a study spend the same compute"),
        ({"arms": [{"arm": "counting", "budget": "1G"}]}, "arm 'counting' has a separate budget, 1G"),
        ({"arms": [3]}, "an arm is a text such as 'static:3' or 'counting'; found 3"),
        ({"arms": ["off", "off"]}, "an arm may occur only once in a study; found off, off"),
        ({"arms": ["sttaic"]}, "unknown arm 'sttaic'; did you mean static"),
        ({"arms": ["periodic"]}, "the arm 'periodic' needs a plan, such as periodic:stack@r0c0:12"),
        ({"selection_rng_seeds": 0, "learning_rate_factors": [0.5, 1.0]},
         "with selection_rng_seeds = 0 rates and plans would be chosen by what is reported"),
        ({"selection_rng_seeds": 0, "learning_rate_factors": [1.0], "arms": ["off", "schedule"]},
         "with selection_rng_seeds = 0 rates and plans would be chosen by what is reported"),
        ({"arms": ["halving:3"]}, "the arm 'halving' takes nothing behind a colon; found '3'"),
        ({"arms": ["static:1", "halving"]}, "the arm 'halving' chooses among fixed sizes; add the arm"),
        ({"arms": ["clock"]}, "the arm 'clock' needs the factor of the compute from one growth to the next"),
        ({"arms": ["clock:fast"]}, "'clock:fast' never grows; give a factor above 1 and below 25.6"),
        ({"arms": ["clock:1"]}, "'clock:1' never grows; give a factor above 1 and below 25.6"),
        ({"arms": ["clock:26"]}, "'clock:26' never grows; give a factor above 1 and below 25.6"),
        ({"arms": ["clock:nan"]}, "'clock:nan' never grows"),
        ({"tasks": ["digits_impaired"], "budget": "1G", "marks": [1.0], "arms": ["clock:2"]},
         "task 'digits_impaired' has no static sizes"),
        ({"arms": ["periodic:stack@r0c7:1"]}, "slot 'r0c7' is not in this model; its slots are r0c0, r0c1"),
        ({"arms": ["ppo:nowhere"]}, "'nowhere' holds no checkpoint"),
        ({"arms": ["shuffled:nowhere"]}, "'nowhere' holds no checkpoint"),
        ({"arms": ["off", "static_final:grown"]}, "unknown grown arm 'grown'. Allowed: off"),
        ({"arms": ["static", "static_final:static"]}, "unknown grown arm 'static'. Allowed: none"),
        ({"arms": {"a": ["static", "static:2"]}}, "'a' has static, static:2"),
        ({"arms": {"a": []}}, "'a' has none"),
        ({"arms": {"static": "static", "static:2": "off"}}, "two arms have the name 'static:2'"),
        ({"arms": {"a\nb": "off"}}, "1 to 80 printable letters; found 'a\\nb'"),
        ({"arms": {}}, "arms: dictionary should have at least 1 item"),
        ({"arms": 3}, "arms are a list such as ['off', 'static'] or a table of names"),
        ({"control": "of", "arms": ["off"]}, "unknown arm as control 'of'; did you mean off?"),
        ({"budget": "1M"}, "a budget of 1,000,000 FLOP gives each of 10 steps 100,000, and one minibatch"),
        ({"marks": [0.3, 1.0]}, "an answer at 0.3 of the budget needs a wsd schedule and a whole step"),
        ({"marks": [1.0, 0.5]}, "marks rise from one to the next, and the last is 1; found [1.0, 0.5]"),
        ({"marks": [0.5]}, "the last is 1; found [0.5]"),
        ({"first_rng_seed": 999_999}, "rng seeds 999999 to 1000000 lie among those to choose with"),
        ({"tasks": ["digits_impaired"]}, "task 'digits_impaired' has no budget that arms could share"),
        ({"tasks": ["digits_impaired"], "budget": "1G", "marks": [1.0]},
         "task 'digits_impaired' has no static sizes"),
        ({"tasks": ["digits_impaired"], "budget": "1G", "arms": ["off"]},
         "'digits_impaired' has 20 steps and the schedule cosine: choose other marks"),
        ({"bugdet": 3}, "unknown key 'bugdet'; did you mean budget?"),
        ({"rng_seeds": 0}, "rng_seeds: input should be greater than or equal to 1; found 0"),
    ],
)  # fmt: skip
def test_invalid_study_files_are_refused_with_one_sentence(changes, sentence):
    assert sentence in refused(**changes)


def test_all_errors_of_a_study_file_are_reported_at_once():
    sentence = refused(arms=["static:9", "ppo:nowhere"], marks=[0.3, 1.0], control="x")
    for part in ("'static:9'", "'nowhere'", "an answer at 0.3", "control 'x'"):
        assert part in sentence


def test_valid_study_files_are_accepted():
    check_study(
        study(arms=["off", "static", "halving", "extrapolated", "clock:3", "random", "schedule", "counting"])
    )
    check_study(study(arms={"a": "periodic:stack@r0c0:1", "b": "static_final:a"}, control="b"))
    check_study(study(arms=["off", "static"], control="static:2"))
    check_study(study(tasks=["digits_impaired"], budget="1G", marks=[1.0], arms=["off", "heuristic"]))


def test_a_clock_copies_a_block_at_every_multiple_of_its_factor_from_1_32_of_the_budget_on():
    # 5 of 160 steps are 1/32 of the budget: 5 × 2.2 = 11, then 24.2, 53.24, 117.1; the decay starts at 128.
    task = task_named("pycode_scaling")
    assert clock_plan(task, "clock:2.2") == "stack@r0c0:11,stack@r0c1:24,stack@r0c2:53,stack@r0c3:117"
    # Two slots; 10 steps, so that a step is longer than the first multiples.
    assert clock_plan(TASK, "clock:1.5") == "stack@r0c0:1,stack@r0c1:2"


def test_selection_uses_the_reported_rng_seeds_if_the_number_of_selection_rng_seeds_is_0():
    found = study(selection_rng_seeds=0, learning_rate_factors=[1.0])
    assert found.selection == found.evaluation
    assert study().selection != study().evaluation
