import pytest

from esper.leyline import BLUEPRINT_IDS, BlendOperator, GradientStatistics, SeedStateReport, SlotTable, Stage
from esper.leyline.reports import freshness, report_slot, report_slots
from tests.leyline.building import put, space_of


def test_report_of_an_empty_slot_has_only_its_stage_and_epochs_in_stage() -> None:
    table = SlotTable.empty(1, 2)
    put(table, 1, Stage.EMBARGOED, epochs_in_stage=2)
    assert report_slot(table, 0, 1, space_of(2)) == SeedStateReport(
        slot_id="r0c1", stage=Stage.EMBARGOED, epochs_in_stage=2
    )


def test_report_of_a_seed_has_the_values_of_its_slot_in_the_slot_table() -> None:
    table = SlotTable.empty(1, 3)
    put(table, 0, Stage.FOSSILIZED, alpha=1.0, blueprint=3)
    put(table, 2, Stage.HOLDING, alpha=0.5, blueprint=3)
    put(
        table,
        1,
        Stage.BLENDING,
        seed_id=4,
        blueprint=7,
        style=3,
        age=6,
        epochs_in_stage=2,
        seed_params=99,
        alpha=0.4,
        alpha_target=1.0,
        ramp_epochs=5,
        ramp_elapsed=2,
        interaction_sum=-0.5,
        strongest_boost=0.25,
        shapley=1.5,
    )
    table.record_contribution(0, 1, 2.0, 0.5)
    table.record_gradients(0, 1, GradientStatistics(0.2, 0.9, vanishing=False, exploding=True), ratio=0.1)
    table.epochs_since_measured[0, 1] = 2
    assert report_slots(table, 0, space_of(3))[1] == SeedStateReport(
        slot_id="r0c1",
        stage=Stage.BLENDING,
        seed_id=4,
        blueprint_id="conv_heavy",
        style_id="gated_gate",
        operator=BlendOperator.GATE,
        age=6,
        epochs_in_stage=2,
        alpha=0.4,
        alpha_target=1.0,
        alpha_mode="UP",
        # Alpha has to rise from 0.4 to 1.0 in 3 epochs, so its velocity is 0.2 per epoch.
        alpha_velocity=pytest.approx(0.2),
        epochs_to_target=3,
        is_leaving=False,
        seed_param_count=99,
        counterfactual_contribution=2.0,
        contribution_error=0.5,
        contribution_velocity=None,
        shapley_value=1.5,
        interaction_sum=-0.5,
        strongest_boost=0.25,
        epochs_since_measured=2,
        # The freshness of a measurement decays by 0.995 per epoch: 0.995² after two epochs.
        freshness=pytest.approx(0.990025),
        seed_gradient_norm=0.2,
        seed_gradient_norm_ratio=0.1,
        gradient_health=0.9,
        previous_health=None,
        is_vanishing=False,
        is_exploding=True,
        upstream_alpha=1.0,
        downstream_alpha=0.5,
    )


def test_report_of_an_unmeasured_seed_has_contribution_none_and_freshness_0() -> None:
    table = SlotTable.empty(1, 1)
    put(table, 0, Stage.TRAINING, blueprint=len(BLUEPRINT_IDS) - 1)
    report = report_slot(table, 0, 0, space_of(1))
    assert report.freshness == 0.0
    assert report.epochs_since_measured is None
    assert report.counterfactual_contribution is None
    assert report.gradient_health is None
    assert report.is_vanishing is None
    assert report.is_exploding is None
    assert freshness(0) == 1.0


def test_report_of_a_seed_in_training_has_alpha_mode_hold() -> None:
    table = SlotTable.empty(1, 1)
    put(table, 0, Stage.TRAINING, blueprint=1, alpha_target=1.0, ramp_epochs=5)
    report = report_slot(table, 0, 0, space_of(1))
    assert (report.alpha_mode, report.alpha_velocity, report.epochs_to_target) == ("HOLD", 0.0, 0)
