"""Gates G0 to G5, the checks before stage changes of a seed."""

import math

import pytest

from esper.kasmina import lifecycle
from esper.leyline import ActionSpace, GradientStatistics, LifecycleRules, SlotConfig, SlotTable, Stage

Checks = tuple[str, ...]
RULES = LifecycleRules(min_training_epochs=2)
UNMEASURED = ("contribution_measured", "contribution_lower_bound")
UNFIT = frozenset({(1, 1)})
SPACE = ActionSpace(SlotConfig.of_count(2), RULES, (1, 3), ("noop", "light", "none", "norm"), UNFIT)


def incubated(*, epochs: int = 2, health: float = 1.0, exploding: bool = False) -> SlotTable:
    """Return a slot table with one incubating seed and its measured gradient health."""
    table = SlotTable.empty(1, 1)
    table.stage[0, 0] = Stage.TRAINING
    table.epochs_in_stage[0, 0] = epochs
    table.record_gradients(
        0, 0, GradientStatistics(1.0, health, vanishing=False, exploding=exploding), ratio=1.0
    )
    return table


@pytest.mark.parametrize(
    ("slot", "blueprint", "failed"),
    [
        (0, 1, ()),
        (1, 3, ()),
        (1, 1, ("blueprint_fits",)),
        (2, 1, ("slot_known",)),
        (-1, 1, ("slot_known",)),
        (0, 0, ("blueprint_selectable",)),
        (0, 2, ("blueprint_selectable",)),
        (5, 99, ("slot_known", "blueprint_selectable")),
    ],
)
def test_gate_g0_refuses_unknown_slots_and_blueprints_that_are_not_selectable_or_do_not_fit(
    slot: int, blueprint: int, failed: tuple[str, ...]
) -> None:
    verdict = lifecycle.g0_valid(SPACE, slot, blueprint)
    assert (verdict.gate, verdict.failed, verdict.ok) == ("G0", failed, not failed)
    assert set(verdict.passed) == {"slot_known", "blueprint_selectable", "blueprint_fits"} - set(failed)


@pytest.mark.parametrize("stage", Stage)
def test_gate_g1_accepts_only_a_seed_in_stage_germinated(stage: Stage) -> None:
    table = SlotTable.empty(1, 1)
    table.stage[0, 0] = stage
    verdict = lifecycle.g1_germinated(table, 0, 0, RULES)
    check = ("stage_germinated",)
    assert verdict == (("G1", check, ()) if stage is Stage.GERMINATED else ("G1", (), check))


@pytest.mark.parametrize(
    ("table", "failed"),
    [
        (incubated(), ()),
        (incubated(health=0.7), ()),
        (incubated(epochs=1), ("epochs",)),
        (incubated(health=0.69), ("health",)),
        (incubated(exploding=True), ("not_exploding",)),
        (incubated(epochs=0, health=0.0, exploding=True), ("epochs", "health", "not_exploding")),
    ],
)
def test_gate_g2_requires_enough_incubation_epochs_and_gradients_that_are_healthy_and_do_not_explode(
    table: SlotTable, failed: tuple[str, ...]
) -> None:
    verdict = lifecycle.g2_trained(table, 0, 0, RULES)
    assert (verdict.gate, verdict.failed) == ("G2", failed)
    assert set(verdict.passed) == {"epochs", "health_measured", "health", "not_exploding"} - set(failed)


def test_gate_g2_fails_without_measured_gradients_unless_incubation_has_0_epochs() -> None:
    table = SlotTable.empty(1, 1)
    table.epochs_in_stage[0, 0] = 9
    verdict = lifecycle.g2_trained(table, 0, 0, RULES)
    assert verdict == ("G2", ("epochs",), ("health_measured", "health", "not_exploding"))
    at_once = LifecycleRules(min_training_epochs=0)
    assert lifecycle.g2_trained(SlotTable.empty(1, 1), 0, 0, at_once) == ("G2", ("epochs",), ())


@pytest.mark.parametrize(
    ("target", "elapsed", "failed"),
    [
        (1.0, 3, ()),
        (1.0, 2, ("target_reached",)),
        (0.7, 3, ("target_full",)),
        (0.5, 0, ("target_full", "target_reached")),
    ],
)
def test_gate_g3_requires_an_alpha_target_of_1_that_has_been_reached(
    target: float, elapsed: int, failed: tuple[str, ...]
) -> None:
    table = SlotTable.empty(1, 1)
    table.stage[0, 0] = Stage.BLENDING
    table.alpha_target[0, 0], table.ramp_epochs[0, 0], table.ramp_elapsed[0, 0] = target, 3, elapsed
    verdict = lifecycle.g3_blended(table, 0, 0, RULES)
    assert (verdict.gate, verdict.failed) == ("G3", failed)


@pytest.mark.parametrize(
    ("contribution", "error", "finite", "failed", "failed_if_strict"),
    [
        (-3.0, 0.0, True, (), ("contribution_lower_bound",)),
        (math.nan, 0.0, True, ("contribution_measured",), UNMEASURED),
        (9.0, 0.0, False, ("weights_finite",), ("weights_finite",)),
        # With strict rules, a contribution of 2.96 with standard error 1 suffices: its lower bound is 2.96 −
        # 1.96 = 1, the required minimum.
        (2.96, 1.0, True, (), ()),
        (2.95, 1.0, True, (), ("contribution_lower_bound",)),
        (1.0, 0.0, True, (), ()),
        (5.0, math.nan, True, (), ("contribution_lower_bound",)),
    ],
)
def test_gate_g5_requires_finite_weights_and_a_contribution_and_if_strict_a_large_enough_lower_bound(
    contribution: float, error: float, finite: bool, failed: Checks, failed_if_strict: Checks
) -> None:
    table = SlotTable.empty(1, 1)
    table.contribution[0, 0], table.contribution_error[0, 0] = contribution, error
    strict = LifecycleRules(strict_fossilize=True, min_contribution=1.0)
    verdicts = [lifecycle.g5_worthy(table, 0, 0, rules, finite=finite) for rules in (RULES, strict)]
    assert [verdict.failed for verdict in verdicts] == [failed, failed_if_strict]
    assert "contribution_lower_bound" not in verdicts[0].passed
