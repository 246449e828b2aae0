import pytest

from esper.leyline import EpochFacts, Head, LifecycleOp, SlotTable, Stage
from esper.tamiyo import HeuristicController, HeuristicSettings
from esper.tamiyo.heuristic import evaluate
from tests.leyline.building import env_facts, facts_of, put, space_of
from tests.tamiyo.heuristic_episodes import HELD, Episode, decide, held


def test_seed_whose_contribution_has_a_positive_lower_confidence_bound_is_fossilized() -> None:
    # Contribution 2 with standard error 1 has the lower confidence bound 2 − 1.96, which is positive.
    assert decide(held(2.0)) == [LifecycleOp.FOSSILIZE, 1, 0, 0, 1, 2, 0, 0]
    # Contribution 1.9 has the lower confidence bound 1.9 − 1.96, which is negative.
    assert decide(held(1.9))[0] == LifecycleOp.WAIT
    assert decide(held(float("nan"), float("nan")))[0] == LifecycleOp.WAIT, (
        "an unknown contribution does not decide"
    )


def test_seed_whose_contribution_has_a_negative_upper_confidence_bound_is_pruned() -> None:
    # Contribution −2 has the upper confidence bound −2 + 1.96, which is negative.
    assert decide(held(-2.0)) == [LifecycleOp.PRUNE, 1, 0, 0, 1, 2, 0, 0]
    assert decide(held(-1.9))[0] == LifecycleOp.WAIT


def test_seed_with_negative_contribution_is_pruned_at_constant_alpha_and_not_during_an_alpha_ramp() -> None:
    table = held(-5.0)
    put(table, 1, Stage.BLENDING, alpha=0.5, ramp_epochs=3, ramp_elapsed=3, epochs_in_stage=4)
    assert decide(table)[:2] == [LifecycleOp.PRUNE, 1]
    table.epochs_in_stage[0, 1] = 3
    assert decide(table)[0] == LifecycleOp.WAIT, "a contribution measured during a ramp does not decide"
    put(table, 1, Stage.BLENDING, ramp_elapsed=2, epochs_in_stage=4)
    assert decide(table)[0] == LifecycleOp.WAIT


def test_seed_below_min_prune_age_is_not_pruned() -> None:
    assert decide(held(-2.0, age=2))[0] == LifecycleOp.WAIT, "min_prune_age is 3"
    assert decide(held(-2.0, leaving=True))[0] == LifecycleOp.WAIT


def test_seed_with_the_best_contribution_is_fossilized_first_and_the_worst_is_pruned_first() -> None:
    table = SlotTable.empty(1, 4)
    for slot, contribution in enumerate([3.0, 8.0, -3.0, -8.0]):
        put(table, slot, Stage.HOLDING, contribution=contribution, contribution_error=0.1, **HELD)
    assert decide(table)[:2] == [LifecycleOp.FOSSILIZE, 1]
    table.stage[0, 1] = Stage.FOSSILIZED
    assert decide(table)[:2] == [LifecycleOp.FOSSILIZE, 0]
    table.stage[0, 0] = Stage.FOSSILIZED
    assert decide(table)[:2] == [LifecycleOp.PRUNE, 3]


def test_strict_rules_fossilize_only_seeds_that_pass_gate_g5() -> None:
    strict = space_of(strict_fossilize=True, min_contribution=1.0)
    # The lower confidence bound 2.5 − 1.96 = 0.54 is below the required contribution of 1.
    assert decide(held(2.5), space=strict)[0] == LifecycleOp.WAIT
    # The lower confidence bound 3 − 1.96 = 1.04 is above the required contribution of 1.
    assert decide(held(3.0), space=strict)[0] == LifecycleOp.FOSSILIZE
    assert decide(held(2.5, epochs_in_stage=5), space=strict)[0] == LifecycleOp.PRUNE, (
        "stuck, since the gate refuses"
    )


def test_heuristic_germinates_only_if_no_seed_is_fossilized_or_pruned() -> None:
    assert decide(SlotTable.empty(1, 3), epoch=0) == [LifecycleOp.GERMINATE, 1, 7, 0, 0, 2, 0, 0]
    assert decide(held(2.0), epoch=1)[0] == LifecycleOp.FOSSILIZE
    assert decide(held(-2.0), epoch=1)[0] == LifecycleOp.PRUNE
    assert decide(held(0.0), epoch=1)[:2] == [LifecycleOp.GERMINATE, 0]


@pytest.mark.parametrize(
    ("auto_forward", "last"),
    [
        # Last epoch for planting: horizon 20 minus 2 epochs of incubation, 3 of the ramp and 1 of evaluation.
        (True, 14),
        (False, 13),  # Without auto-forward a seed spends one more epoch in GERMINATED.
    ],
)
def test_no_germination_when_too_few_epochs_are_left_to_evaluate_a_seed(
    auto_forward: bool, last: int
) -> None:
    space, table = space_of(auto_forward=auto_forward), SlotTable.empty(1, 3)
    assert decide(table, epoch=last, space=space)[0] == LifecycleOp.GERMINATE
    assert decide(table, epoch=last + 1, space=space)[0] == LifecycleOp.WAIT


def test_heuristic_uses_the_op_advance_if_auto_forward_is_off() -> None:
    space, table = space_of(auto_forward=False), SlotTable.empty(1, 3)
    put(table, 2, Stage.GERMINATED)
    assert decide(table, epoch=1, space=space)[:2] == [LifecycleOp.ADVANCE, 2]
    assert decide(table, epoch=1)[0] == LifecycleOp.GERMINATE, "with auto-forward ADVANCE is not needed"


def test_penalties_of_a_blueprint_for_two_removed_seeds_add_up() -> None:
    episode = Episode(penalty_steps=2)
    put(episode.table, 1, Stage.TRAINING, blueprint=3)
    episode.plant(0)
    episode.lose(0)
    episode.lose(1)
    assert [episode.plant(epoch) for epoch in range(1, 6)] == [7, 7, 7, 7, 3]


def test_blueprint_of_a_seed_with_a_prune_ramp_is_penalised_once() -> None:
    episode = Episode(penalty_steps=2)
    put(episode.table, 0, Stage.BLENDING, alpha=1.0, ramp_epochs=3)
    episode.plant(0)
    episode.table.leaving[0, 0] = True
    assert episode.plant(1) == 7
    episode.lose(0)
    assert [episode.plant(2), episode.plant(3)] == [7, 3]


def test_blueprint_of_a_failed_germination_is_penalised() -> None:
    episode = Episode()
    before = episode.table.copy()
    assert episode.plant(0) == 3
    episode.table.assign(before)
    assert episode.plant(1) == 7


def test_blueprint_of_a_fossilized_seed_is_not_penalised() -> None:
    episode = Episode()
    episode.plant(0)
    episode.table.stage[0, 0] = Stage.FOSSILIZED
    assert episode.plant(1) == 3


@pytest.mark.parametrize("restart", ["reset", "epoch 0"])
@pytest.mark.parametrize("remembered", ["a loss", "a seed"])
def test_new_episode_starts_without_blueprint_penalties(restart: str, remembered: str) -> None:
    episode = Episode()
    episode.plant(0)
    if remembered == "a loss":
        episode.lose(0)
        episode.plant(1)
    if restart == "reset":
        episode.controller.reset(1)
    for slot in range(8):
        episode.table.clear(0, slot)
    assert episode.plant(0 if restart == "epoch 0" else 1) == 3, "the first of the rotation"


def test_reset_of_the_heuristic_clears_the_plateau_count() -> None:
    controller = HeuristicController(space_of(), 1, HeuristicSettings(patience=1))
    table = SlotTable.empty(1, 3)
    ops = [controller.decide(facts_of(epoch), table).actions[0, Head.OP] for epoch in range(2)]
    assert ops == [LifecycleOp.WAIT, LifecycleOp.GERMINATE]
    controller.reset(1)
    assert controller.decide(facts_of(2), table).actions[0, Head.OP] == LifecycleOp.WAIT


def test_heuristic_rules_never_fossilize_and_prune_the_same_seed() -> None:
    rules, settings = space_of().rules, HeuristicSettings()
    worthy, unwanted = evaluate(held(0.5, epochs_in_stage=9), rules, settings)
    assert (worthy[0, 1], unwanted[0, 1]) == (True, False)
    parked = held(5.0, epochs_in_stage=9)
    put(parked, 1, Stage.BLENDING, alpha=0.5, ramp_epochs=3, ramp_elapsed=3)
    worthy, unwanted = evaluate(parked, rules, settings)
    assert (worthy[0, 1], unwanted[0, 1]) == (False, True), "at the horizon only seeds in HOLDING are kept"


def test_heuristic_decides_for_each_environment_independently() -> None:
    controller = HeuristicController(space_of(1), 2, HeuristicSettings(rotation=("norm", "conv_heavy")))
    table = SlotTable.empty(2, 1)
    put(table, 0, Stage.TRAINING, env=0, blueprint=3)
    put(table, 0, Stage.HOLDING, env=1, contribution=9.0, contribution_error=0.1, **HELD)
    first = controller.decide(facts_of(0, num_envs=2), table).actions
    assert first[:, Head.OP].tolist() == [LifecycleOp.WAIT, LifecycleOp.FOSSILIZE]
    table.clear(0, 0)
    table.clear(1, 0)
    facts = EpochFacts.stack([env_facts(1), env_facts(0)])  # Environment 1 is at epoch 0 of a new episode.
    assert controller.decide(facts, table).actions[:, Head.BLUEPRINT].tolist() == [7, 3]
