import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline import SlotConfig, SlotTable, Stage
from esper.tamiyo.policy.features import batch_obs_to_features, feature_names, get_feature_size
from tests.leyline.building import put, random_table
from tests.tamiyo.policy.observations import MEASUREMENTS, observe, signals_of, wild, wild_signals

BASE_NAMES = [
    "progress", "loss", "loss_delta", "score", "score_delta", "plateau", "stabilised",
    "losses_0", "losses_1", "losses_2", "losses_3", "losses_4",
    "scores_0", "scores_1", "scores_2", "scores_3", "scores_4",
    "best_score", "best_loss", "parameter_use", "slot_use",
    "share_training", "share_blending", "share_holding",
    "last_success", "last_op_0", "last_op_1", "last_op_2", "last_op_3", "last_op_4", "last_op_5",
]  # fmt: skip

SLOT_NAMES = [
    "active", "stage_0", "stage_1", "stage_2", "stage_3", "stage_4",
    "stage_5", "stage_6", "stage_7", "stage_8", "stage_9",
    "alpha", "alpha_target", "alpha_mode", "alpha_velocity", "time_to_target", "operator",
    "contribution", "contribution_velocity", "epochs_in_stage",
    "gradient_norm", "gradient_health", "previous_health", "vanishing", "exploding",
    "interaction_sum", "strongest_boost", "upstream_alpha", "downstream_alpha", "freshness",
]  # fmt: skip


@pytest.mark.parametrize(("slots", "size"), [(1, 61), (2, 91), (3, 121), (4, 151), (5, 181), (8, 271)])
def test_observation_has_31_columns_and_30_more_per_slot(slots: int, size: int) -> None:
    config = SlotConfig.of_count(slots)
    obs, blueprints = batch_obs_to_features(signals_of(2), SlotTable.empty(2, slots), config)
    assert get_feature_size(config) == size
    assert obs.shape == (2, size)
    assert obs.dtype == torch.float32
    assert blueprints.shape == (2, slots)
    assert blueprints.dtype == torch.int64
    names = BASE_NAMES + [f"slot{slot}.{name}" for slot in range(slots) for name in SLOT_NAMES]
    assert list(feature_names(slots)) == names


def test_features_of_host_and_episode_have_the_expected_values() -> None:
    table = SlotTable.empty(1, 3)
    put(table, 0, Stage.HOLDING)
    put(table, 1, Stage.BLENDING)
    (row,), _ = observe(table)
    ln11 = math.log(11.0)
    expected = {
        "progress": 0.25,  # Epoch 5 is a quarter of 20 epochs.
        "loss": math.log(10.0) / ln11,
        "loss_delta": 0.25,
        "score": 0.625,
        "score_delta": -0.3,
        "plateau": 0.2,
        "stabilised": 1.0,
        "losses_0": 1.0,  # A loss of 10 is scaled to ln(1 + 10) / ln 11.
        "losses_1": math.log(10.0) / ln11,
        "losses_2": math.log(9.0) / ln11,
        "losses_3": math.log(8.0) / ln11,
        "losses_4": math.log(7.0) / ln11,
        "scores_0": 0.1,
        "scores_1": 0.2,
        "scores_2": 0.3,
        "scores_3": 0.4,
        "scores_4": 0.5,
        "best_score": 0.7,
        "best_loss": math.log(7.0) / ln11,
        "parameter_use": 0.75,  # The network has 999 of 9,999 allowed parameters: ln 1000 / ln 10000.
        "slot_use": 2 / 3,
        "share_training": 0.0,
        "share_blending": 1 / 3,
        "share_holding": 1 / 3,
        "last_success": 0.0,
        **{f"last_op_{op}": float(op == 3) for op in range(6)},
    }
    assert {name: row[name] for name in BASE_NAMES} == pytest.approx(expected, abs=1e-6)


BLENDING = {
    "blueprint": 7,
    "style": 3,
    "alpha": 0.4,
    "alpha_target": 1.0,
    "ramp_epochs": 5,
    "ramp_elapsed": 2,
    "epochs_in_stage": 2,
    "contribution": 2.0,
    "contribution_velocity": -0.5,
    "epochs_since_measured": 2,
    "gradient_norm": 3.0,
    "gradient_health": 0.9,
    "previous_health": 0.8,
    "vanishing": 0.0,
    "exploding": 1.0,
    "interaction_sum": -1.5,
    "strongest_boost": 2.5,
}


def test_slot_features_of_a_seed_in_blending_have_the_expected_values() -> None:
    table = SlotTable.empty(1, 3)
    put(table, 0, Stage.FOSSILIZED, alpha=1.0, blueprint=3)
    put(table, 1, Stage.BLENDING, **BLENDING)
    put(table, 2, Stage.HOLDING, alpha=0.5, blueprint=3)
    (row,), (blueprints,) = observe(table)
    expected = {
        "active": 1.0,
        **{f"stage_{stage}": float(stage == 4) for stage in range(10)},
        "alpha": 0.4,
        "alpha_target": 1.0,
        "alpha_mode": 0.5,  # A rising alpha is encoded as 0.5.
        "alpha_velocity": 0.2,  # Alpha velocity per epoch: alpha has to rise by 0.6 in 3 epochs.
        "time_to_target": 0.375,  # Time to target: the alpha ramp has 3 epochs left, divided by 8.
        "operator": 1.0,  # The operator of style gated_gate is encoded as 1.
        "contribution": 0.2,
        "contribution_velocity": -0.05,
        "epochs_in_stage": 0.1,  # The seed has spent 2 of 20 epochs in its stage.
        "gradient_norm": 0.3,
        "gradient_health": 0.9,
        "previous_health": 0.8,
        "vanishing": 0.0,
        "exploding": 1.0,
        "interaction_sum": -0.15,
        "strongest_boost": 0.5,
        "upstream_alpha": 1 / 3,
        "downstream_alpha": 0.5 / 3,
        "freshness": 0.990025,  # The freshness of a measurement decays to 0.995² in two epochs.
    }
    assert {name: row[f"slot1.{name}"] for name in SLOT_NAMES} == pytest.approx(expected, abs=1e-6)
    assert blueprints == [3, 7, 3]


@pytest.mark.parametrize(
    ("column", "changes", "expected"),
    [
        ("alpha_mode", {"alpha_from": 1.0, "alpha_target": 0.0}, 1.0),  # A falling alpha is encoded as 1.
        ("alpha_velocity", {"alpha_from": 1.0, "alpha": 0.75, "alpha_target": 0.0}, -0.25),
        ("alpha_mode", {"ramp_elapsed": 5}, 0.0),  # A constant alpha is encoded as 0.
        ("alpha_velocity", {"ramp_elapsed": 5}, 0.0),
        ("time_to_target", {"ramp_elapsed": 5}, 0.0),
        # The time to target of an alpha ramp with 16 epochs left is clipped to 8 epochs.
        ("time_to_target", {"ramp_epochs": 18}, 1.0),
        ("operator", {"style": 0}, 0.0),
        ("operator", {"style": 1}, 0.5),  # The operator of style linear_multiply is encoded as 0.5.
        ("operator", {"style": 2}, 0.0),  # Style sigmoid_add adds the delta, like style linear_add.
        ("contribution", {"contribution": 25.0}, 1.0),
        ("contribution", {"contribution": -25.0}, -1.0),
        ("contribution_velocity", {"contribution_velocity": 25.0}, 1.0),
        ("contribution_velocity", {"contribution_velocity": -25.0}, -1.0),
        ("epochs_in_stage", {"epochs_in_stage": 20}, 1.0),
        ("gradient_norm", {"gradient_norm": 50.0}, 1.0),
        ("interaction_sum", {"interaction_sum": 25.0}, 1.0),
        ("interaction_sum", {"interaction_sum": -25.0}, -1.0),
        ("strongest_boost", {"strongest_boost": 9.0}, 1.0),
        ("strongest_boost", {"strongest_boost": -3.0}, 0.0),
        ("vanishing", {"vanishing": 1.0}, 1.0),
        ("freshness", {"epochs_since_measured": 0}, 1.0),
        ("gradient_norm", {"gradient_norm": np.inf}, 1.0),
        ("contribution", {"contribution": -np.inf}, -1.0),
        ("strongest_boost", {"strongest_boost": np.inf}, 1.0),
        ("gradient_health", {"gradient_health": np.inf}, 2.0),
    ],
)
def test_slot_features_are_scaled_and_clipped(column: str, changes: dict[str, Any], expected: float) -> None:
    table = SlotTable.empty(1, 1)
    put(table, 0, Stage.BLENDING, **(BLENDING | changes))
    (row,), _ = observe(table)
    assert row[f"slot0.{column}"] == pytest.approx(expected)


def test_features_upstream_alpha_and_downstream_alpha_reach_their_maximum_at_a_total_alpha_of_three() -> None:
    table = SlotTable.empty(1, 5)
    for slot in range(5):
        put(table, slot, Stage.HOLDING, alpha=1.0)
    (row,), _ = observe(table)
    assert [row[f"slot{slot}.upstream_alpha"] for slot in range(5)] == pytest.approx([0, 1 / 3, 2 / 3, 1, 1])
    downstream = [row[f"slot{slot}.downstream_alpha"] for slot in range(5)]
    assert downstream == pytest.approx([1, 1, 2 / 3, 1 / 3, 0])
    put(table, 0, Stage.TRAINING, alpha=0.9)
    (row,), _ = observe(table)
    assert row["slot1.upstream_alpha"] == 0.0, "an alpha outside of the forward pass does not count"


def test_slot_features_of_missing_measurements_are_zero() -> None:
    table = SlotTable.empty(1, 1)
    put(table, 0, Stage.TRAINING, blueprint=1)
    (row,), _ = observe(table)
    unknown = [*MEASUREMENTS, "freshness"]
    assert {name: row[f"slot0.{name}"] for name in unknown} == dict.fromkeys(unknown, 0.0)


@pytest.mark.parametrize(
    ("changes", "column", "expected"),
    [
        ({"loss_delta": 5.0}, "loss_delta", 1.0),
        ({"loss_delta": -5.0}, "loss_delta", -1.0),
        ({"score_delta": 25.0}, "score_delta", 1.0),
        ({"score_delta": -25.0}, "score_delta", -1.0),
        ({"plateau_epochs": 40}, "plateau", 1.0),
        ({"stabilised": False}, "stabilised", 0.0),
        ({"last_success": True}, "last_success", 1.0),
        ({"val_loss": 1e9}, "loss", 2.0),
        ({"val_loss": 0.0}, "loss", 0.0),
        # Non-finite losses and scores of a diverged host are encoded as a bad loss or score.
        ({"val_loss": np.nan}, "loss", 2.0),
        ({"val_loss": np.inf}, "loss", 2.0),
        ({"best_loss": np.nan}, "best_loss", 2.0),
        ({"loss_history": [1.0, np.nan, 1.0, 1.0, 1.0]}, "losses_1", 2.0),
        ({"loss_history": [1.0, np.inf, 1.0, 1.0, 1.0]}, "losses_1", 2.0),
        ({"loss_delta": np.nan}, "loss_delta", -1.0),
        ({"loss_delta": -np.inf}, "loss_delta", -1.0),
        ({"score_delta": np.nan}, "score_delta", -1.0),
        ({"score_delta": -np.inf}, "score_delta", -1.0),
        ({"val_score": np.nan}, "score", 0.0),
        ({"val_score": -np.inf}, "score", -2.0),
    ],
)
def test_base_features_are_clipped_to_their_range(
    changes: dict[str, Any], column: str, expected: float
) -> None:
    (row,), _ = observe(SlotTable.empty(1, 1), signals_of(**changes))
    assert row[column] == pytest.approx(expected)


def test_features_of_an_empty_slot_are_zero_for_any_values_in_the_slot_table() -> None:
    table = SlotTable.empty(1, 3)
    put(table, 0, Stage.HOLDING, **BLENDING)
    put(table, 1, Stage.DORMANT, **(BLENDING | {"blueprint": -1}))
    obs, blueprints = batch_obs_to_features(signals_of(), table, SlotConfig.of_count(3))
    assert obs[0, 61:121].tolist() == [0.0] * 60
    assert obs[0, 31:61].abs().sum() > 0.0
    assert blueprints.tolist() == [[7, -1, -1]]


def test_features_of_an_embargoed_slot_are_zero_except_active_flag_stage_and_epochs_in_stage() -> None:
    table = SlotTable.empty(1, 2)
    put(table, 1, Stage.EMBARGOED, epochs_in_stage=2)
    (row,), (blueprints,) = observe(table)
    known = {"active": 1.0, "stage_8": 1.0, "epochs_in_stage": 0.1}
    assert {name: row[f"slot1.{name}"] for name in SLOT_NAMES} == pytest.approx(
        dict.fromkeys(SLOT_NAMES, 0.0) | known
    )
    assert row["slot_use"] == 0.5
    assert blueprints == [-1, -1]


CONTEXT = {
    "trend": 5 / 3,  # The loss 9 is predicted to fall by 1 in each of 15 remaining steps: 15 / 9.
    "gap": 1 / 3,  # Relative gap between validation loss 9 and training loss 6: (9 - 6) / 9.
    "candidate_cost": 0.5 * math.log2(1.75),
    "minibatches_left": 1.0,  # The 1023 minibatches that are left are encoded as log2(1 + 1023) / 10.
    "newborn_gradient": 0.5 * math.log(0.5),  # The youngest seed (slot 1) has gradient norm ratio 0.5.
    "gain_ratio": 0.75,
}


def test_context_features_are_appended_and_other_features_do_not_change() -> None:
    table = SlotTable.empty(1, 3)
    put(table, 0, Stage.HOLDING, age=7, gradient_norm_ratio=2.0)
    put(table, 1, Stage.BLENDING, age=2, gradient_norm_ratio=0.5)
    config = SlotConfig.of_count(3)
    plain, _ = batch_obs_to_features(signals_of(), table, config)
    obs, _ = batch_obs_to_features(signals_of(), table, config, context=True)
    assert obs.shape == (1, get_feature_size(config, context=True)) == (1, 127)
    assert torch.equal(obs[:, :121], plain)
    assert feature_names(3, context=True) == (*feature_names(3), *CONTEXT)
    assert obs[0, 121:].tolist() == pytest.approx(list(CONTEXT.values()))


def test_context_features_of_missing_measurements_are_zero() -> None:
    unknown = dict.fromkeys(("train_loss", "minibatches_left", "candidate_cost", "gain_ratio"), math.nan)
    signals = signals_of(epoch=0, **unknown)
    obs, _ = batch_obs_to_features(signals, SlotTable.empty(1, 3), SlotConfig.of_count(3), context=True)
    assert obs[0, 121:].tolist() == [0.0] * 6


def test_features_of_an_environment_do_not_depend_on_other_environments() -> None:
    table = SlotTable.empty(2, 1)
    put(table, 0, Stage.HOLDING, env=1, **BLENDING)
    rows, blueprints = observe(table)
    assert [row["slot0.active"] for row in rows] == [0.0, 1.0]
    assert [row["slot_use"] for row in rows] == [0.0, 1.0]
    assert blueprints == [[-1], [7]]


@given(rng_seed=st.integers(0, 2**32 - 1), num_slots=st.sampled_from([1, 2, 3, 4, 5, 8]))
def test_features_are_finite_and_bounded_for_extreme_inputs(rng_seed: int, num_slots: int) -> None:
    rng = np.random.default_rng(rng_seed)
    table = random_table(rng, 4, num_slots)
    for name in MEASUREMENTS:
        getattr(table, name)[...] = wild(rng, 4, num_slots)
    config = SlotConfig.of_count(num_slots)
    obs, _ = batch_obs_to_features(wild_signals(rng, 4), table, config, context=True)
    assert torch.isfinite(obs).all()
    assert obs.abs().max() <= 2.0
