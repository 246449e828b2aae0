"""Commit at the horizon: live seeds are fossilized or pruned, and the committed network is scored."""

import pytest
import torch

from esper.leyline import LifecycleRules, Stage
from esper.leyline.errors import DataError
from esper.leyline.rows import CounterfactualRow, TransitionRow
from esper.tolaria.tasks.spec import CLASSIFICATION
from tests.tolaria.building import WAIT, plant, run, stages_of, started, stir, tiny_task


def test_commit_fossilizes_seeds_in_stage_holding_and_prunes_all_other_live_seeds() -> None:
    env, sink = started(tiny_task((2, 4, 4, 4), horizon=7))
    # At the horizon the seed of slot 0 is blending, that of slot 1 held, that of slot 2 incubating; slot 3 is
    # empty.
    run(env, {0: plant(1), 3: plant(0)}, until=6)
    env.step(plant(2))
    assert stages_of(env) == [Stage.EMBARGOED, Stage.FOSSILIZED, Stage.EMBARGOED, Stage.DORMANT]
    assert [env.model.slot(i).seed is None for i in range(4)] == [True, False, True, True]
    last = [row for row in sink.of(TransitionRow) if row.epoch == 7 and row.to_stage != Stage.EMBARGOED]
    assert [(row.slot, Stage(row.from_stage).name, Stage(row.to_stage).name) for row in last] == [
        (0, "BLENDING", "PRUNED"),
        (1, "HOLDING", "FOSSILIZED"),
        (2, "TRAINING", "PRUNED"),
    ]
    assert {row.cause for row in last} == {"mechanical"}
    assert last[0].reason == "not held at the horizon"


def test_seed_that_gate_g5_refuses_at_the_horizon_is_pruned_with_the_reason_in_its_transition_row() -> None:
    rules = LifecycleRules(min_training_epochs=2, strict_fossilize=True, min_contribution=100.0)
    env, sink = started(tiny_task(horizon=6, rules=rules))
    run(env, {0: plant(1)})
    assert stages_of(env)[1] == Stage.EMBARGOED
    [row] = [row for row in sink.of(TransitionRow) if row.to_stage == Stage.PRUNED]
    assert row.reason == "refused by G5 at the horizon: contribution_lower_bound"


def test_final_score_and_counterfactual_rows_are_those_of_the_committed_network() -> None:
    env, sink = started(tiny_task(horizon=7))
    run(env, {0: plant(1), 3: plant(0)}, until=6)
    stir(env.model.slot(0), scale=1.0)
    for read in (env.finish, env.host.splits.test.read):
        with pytest.raises(DataError, match="before the network was committed"):
            read()
    facts = env.step(WAIT)
    report = env.finish()

    validation = env.host.splits.validation
    with torch.no_grad():
        committed = env.model.eval()(validation.x)
    right = (committed.argmax(dim=1) == validation.y).float().mean().item()
    assert report.val_score == facts.val_score == pytest.approx(100.0 * right)
    assert facts.val_loss == pytest.approx(CLASSIFICATION.loss(committed, validation.y).item())
    last = [row for row in sink.of(CounterfactualRow) if row.epoch == 7]
    assert [row.on for row in last] == [[False, False, False], [False, True, False]]
    assert last[-1].loss == pytest.approx(facts.val_loss), (
        "one row per configuration of the committed network"
    )
    (removed,) = [row for row in sink.of(TransitionRow) if row.to_stage == Stage.PRUNED]
    assert removed.slot == 0, "the blending seed took part until the commit"
    assert report.val_scores[-1] == report.val_score
    assert len(report.val_scores) == 8, "the untrained host and seven epochs"
    assert report.params == facts.params == sum(p.numel() for p in env.model.parameters())
    assert 0.0 <= report.test_score <= 100.0
    with pytest.raises(DataError, match="read twice"):
        env.finish()
