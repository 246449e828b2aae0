"""Rewards of every reward family: values computed by hand, and sums over episodes of growing networks."""

import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

from esper.leyline import EpochFacts, LifecycleOp, LifecycleRules, SlotTable, Stage
from esper.simic.rewards.families import (
    FAMILIES,
    FamilyName,
    RewardFunction,
    RewardInputs,
    RewardLog,
    RewardTerms,
    total,
)
from tests.leyline.building import env_facts, put
from tests.simic.episodes import (
    AT_ONCE,
    RENT,
    SCALE,
    busy,
    idle,
    played,
    state_worth,
    task_with,
    twin_scores_again,
)
from tests.tolaria.building import WAIT, action, plant

NAMES: tuple[FamilyName, ...] = get_args(FamilyName)
INCUBATED = LifecycleRules(min_training_epochs=3, min_prune_age=1, embargo_epochs=1)


# --- rewards computed by hand -------------------------------------------------------------------------

TABLE = SlotTable.empty(1, 3)


def inputs(*, twin: float = 0.0, table: SlotTable = TABLE, price: float = 0.0, **facts: Any) -> RewardInputs:
    """Return reward inputs of one environment, with a loss of 2.0 for a constant prediction."""
    stacked = EpochFacts.stack([replace(env_facts(), **facts)])
    return RewardInputs(stacked, table, np.array([twin]), guess_loss=2.0, rent=price)


def rewarded(family: FamilyName, *steps: RewardInputs, scale: float = 1.0) -> list[dict[str, float]]:
    """Return the reward terms of one environment by name, for every step."""
    reward_function = RewardFunction(FAMILIES[family], scale)
    reward_function.begin(steps[0])
    ledgers = [reward_function.reward_terms(now) for now in steps[1:]]
    return [{name: float(value[0]) for name, value in ledger.items()} for ledger in ledgers]


def test_paired_reward_is_the_change_of_the_lead_over_the_twin_minus_the_change_of_the_rent() -> None:
    found = rewarded(
        "paired",
        inputs(val_score=12.0, twin=10.0, price=0.02),
        # Score minus twin's score rises from 2 to 10 points; rent is 500 parameters · 0.02 / 1000 = 0.01.
        inputs(val_score=30.0, twin=20.0, grown_params=500, price=0.02),
        # Score minus twin's score falls from 10 to −5 points, rent from 0.01 to 0.002.
        inputs(val_score=30.0, twin=35.0, grown_params=100, price=0.02),
        scale=5.0,
    )
    assert found == [
        pytest.approx({"lead": 0.4, "rent": -0.05, "rollback": 0.0}),
        pytest.approx({"lead": -0.75, "rent": 0.04, "rollback": 0.0}),
    ]


def measured(*slots: tuple[Stage, float]) -> SlotTable:
    table = SlotTable.empty(1, 3)
    for slot, (stage, contribution) in enumerate(slots):
        put(table, slot, stage, contribution=contribution)
    return table


def test_contribution_reward_is_the_change_of_the_summed_contributions_of_blended_seeds() -> None:
    found = rewarded(
        "contribution",
        inputs(price=0.1),
        inputs(table=measured((Stage.TRAINING, 9.0)), grown_params=300, price=0.1),
        inputs(table=measured((Stage.BLENDING, math.nan)), grown_params=300, price=0.1),
        inputs(table=measured((Stage.HOLDING, 4.0), (Stage.BLENDING, -1.0)), grown_params=300, price=0.1),
        inputs(
            table=measured((Stage.FOSSILIZED, 6.0), (Stage.PRUNED, -1.0)),
            price=0.1,
            last_op=LifecycleOp.PRUNE,
        ),
        scale=2.0,
    )
    assert found == [
        pytest.approx({"contribution": 0.0, "rent": -0.06, "churn": 0.0, "rollback": 0.0}),
        pytest.approx({"contribution": 0.0, "rent": 0.0, "churn": 0.0, "rollback": 0.0}),
        pytest.approx({"contribution": 0.06, "rent": 0.0, "churn": 0.0, "rollback": 0.0}),
        pytest.approx({"contribution": 0.06, "rent": 0.06, "churn": -0.02, "rollback": 0.0}),
    ]


def test_loss_reward_is_the_loss_decrease_divided_by_the_loss_of_a_constant_prediction() -> None:
    losses = (2.0, 1.5, 1.8)
    found = rewarded("loss", *(inputs(val_loss=loss) for loss in losses), scale=5.0)
    assert [ledger["loss"] for ledger in found] == pytest.approx([1.25, -0.75])


def test_log_loss_reward_is_the_logarithm_of_earlier_loss_over_later_loss() -> None:
    found = rewarded("log_loss", *(inputs(val_loss=loss) for loss in (2.0, 1.0, 0.1, 0.0)), scale=5.0)
    # Rewards are 5 · ln(earlier loss / later loss) for losses 2, 1, 0.1, 0; 0 is raised to the bound 0.001.
    assert [ledger["log_loss"] for ledger in found] == pytest.approx([3.46574, 11.51293, 23.02585], abs=1e-5)


def test_sparse_reward_is_zero_before_the_end_of_the_episode() -> None:
    found = rewarded(
        "sparse",
        inputs(val_score=10.0, price=0.1),
        inputs(val_score=90.0, grown_params=2000, price=0.1),
        inputs(val_score=60.0, grown_params=500, price=0.1, ended=True),
        scale=5.0,
    )
    assert found == [
        {"score": 0.0, "rent": 0.0, "rollback": 0.0},
        pytest.approx({"score": 3.0, "rent": -0.25, "rollback": 0.0}),
    ]


@pytest.mark.parametrize("op", LifecycleOp)
@pytest.mark.parametrize("succeeded", [True, False])
def test_churn_cost_is_charged_for_a_successful_prune_and_for_no_other_op(
    op: LifecycleOp, succeeded: bool
) -> None:
    [found] = rewarded("contribution", inputs(), inputs(last_op=op, last_success=succeeded))
    assert found["churn"] == (-0.01 if op is LifecycleOp.PRUNE and succeeded else 0.0)


@pytest.mark.parametrize("family", [name for name in NAMES if name != "contribution"])
def test_only_the_contribution_family_has_a_churn_cost(family: FamilyName) -> None:
    assert rewarded(family, inputs(), inputs()) == rewarded(
        family, inputs(), inputs(last_op=LifecycleOp.PRUNE)
    )


def test_rewards_of_a_diverged_episode_cancel_earlier_rewards_and_add_the_penalty() -> None:
    found = rewarded(
        "paired",
        inputs(val_score=10.0, twin=10.0, price=0.1),
        inputs(val_score=50.0, twin=20.0, grown_params=1000, price=0.1),
        inputs(val_score=50.0, twin=20.0, grown_params=1000, price=0.1, ended=True, rolled_back=True),
        scale=5.0,
    )
    assert found == [
        pytest.approx({"lead": 1.5, "rent": -0.5, "rollback": 0.0}),
        pytest.approx({"lead": -1.5, "rent": 0.5, "rollback": -1.0}),
    ]


def test_diverged_episode_gets_no_score_reward_in_the_sparse_family() -> None:
    [found] = rewarded(
        "sparse", inputs(), inputs(val_score=90.0, grown_params=99, ended=True, rolled_back=True)
    )
    assert found == {"score": 0.0, "rent": 0.0, "rollback": -0.2}


def two(first: float, second: float, **facts: Any) -> RewardInputs:
    """Return reward inputs of two environments with the given differences from their twins' scores."""
    rows = [replace(env_facts(), val_score=score, **facts) for score in (first, second)]
    return RewardInputs(EpochFacts.stack(rows), SlotTable.empty(2, 3), np.zeros(2), 2.0, 0.0)


def test_method_begin_again_resets_the_reward_potentials_of_one_environment() -> None:
    reward_function = RewardFunction(FAMILIES["paired"], 1.0)
    reward_function.begin(two(10.0, 20.0))
    reward_function.reward_terms(two(40.0, 30.0))
    reward_function.begin_again(1, two(99.0, 5.0))
    assert reward_function.reward_terms(two(41.0, 8.0))["lead"].tolist() == pytest.approx([0.01, 0.03])


def test_second_divergence_cancels_the_rewards_of_the_second_attempt() -> None:
    reward_function = RewardFunction(FAMILIES["paired"], 1.0)
    reward_function.begin(two(10.0, 20.0))
    reward_function.begin_again(1, two(10.0, 5.0))
    reward_function.reward_terms(two(10.0, 9.0))
    broken = reward_function.reward_terms(two(10.0, 9.0, ended=True, rolled_back=True))
    assert broken["lead"].tolist() == pytest.approx([0.0, -0.04])


def test_default_discount_factors_of_reward_families_are_as_specified() -> None:
    assert {name: family.gamma for name, family in FAMILIES.items()} == {
        "paired": 1.0,
        "contribution": 0.995,
        "loss": 0.995,
        "log_loss": 1.0,
        "sparse": 1.0,
    }
    assert [name for name, family in FAMILIES.items() if family.needs_twin] == ["paired"]


# --- log of reward terms ------------------------------------------------------------------------------


def terms(*pairs: tuple[float, float]) -> RewardTerms:
    lead, rent = zip(*pairs, strict=True)
    return {"lead": np.array(lead), "rent": np.array(rent)}


def test_reward_log_has_the_mean_episode_sum_of_each_term_and_the_variance_of_all_rewards() -> None:
    reward_log = RewardLog([terms((1.0, -0.5), (3.0, 0.0)), terms((0.0, 0.5), (4.0, -1.0))])
    assert reward_log.mean_terms() == {"lead": 4.0, "rent": -0.5}
    # Standard deviation of the rewards 0.5, 3, 0.5, 3 is 1.25.
    assert reward_log.variance() == pytest.approx(1.5625)


def test_variance_of_rewards_with_a_twin_score_of_0_is_none_for_reward_families_without_a_twin() -> None:
    assert RewardLog([terms((1.0, 0.0))]).variance_unpaired() is None
    assert RewardLog([terms((1.0, 0.0))], [np.array([1.0, 5.0])]).variance_unpaired() == 4.0


def test_join_concatenates_reward_logs_of_shards() -> None:
    one = RewardLog([terms((1.0, 0.0), (2.0, 0.0))], [np.array([1.0, 2.0])], broken_episodes=1)
    other = RewardLog([terms((3.0, -1.0))], [np.array([3.0])], broken_episodes=2)
    joined = RewardLog.join([one, other])
    assert [values.tolist() for values in joined.terms[0].values()] == [[1.0, 2.0, 3.0], [0.0, 0.0, -1.0]]
    assert [values.tolist() for values in joined.unpaired] == [[1.0, 2.0, 3.0]]
    assert joined.broken_episodes == 3


# --- episodes of growing networks ---------------------------------------------------------------------


@pytest.mark.parametrize("family", NAMES)
def test_every_reward_term_is_the_change_of_its_potential_at_every_step(family: FamilyName) -> None:
    episode = busy(family)
    stages = {int(stage) for table in episode.tables for stage in table.stage.flat}
    assert {Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED, Stage.RESETTING} <= stages
    assert sum(episode.terms.values()) == pytest.approx(episode.rewards, abs=1e-12)
    assert (episode.terms["rollback"] == 0.0).all()
    charged = [name for name, values in episode.terms.items() if (values != 0.0).any()]
    assert set(charged) == set(episode.terms) - {"rollback"}, "every other term occurs"
    worth = [state_worth(family, episode, epoch) for epoch in range(len(episode.facts))]
    for name in worth[0]:
        expected = SCALE * np.diff([now[name] for now in worth], axis=0) / 100
        assert episode.terms[name] == pytest.approx(expected, abs=1e-9), name


@pytest.mark.parametrize(("rng_seed", "family"), list(zip((1, 2, 3, 6, 6), NAMES, strict=True)))
def test_potential_terms_of_the_reward_telescope_over_random_episodes(
    rng_seed: int, family: FamilyName
) -> None:
    episode = played(family, task=task_with(horizon=12), rng_seed=rng_seed)
    counts = np.sum([report.op_counts for report in episode.reports], axis=0)
    assert (counts[[LifecycleOp.GERMINATE, LifecycleOp.PRUNE, LifecycleOp.FOSSILIZE]] > 0).all()
    begin, end = state_worth(family, episode, 0), state_worth(family, episode, len(episode.facts) - 1)
    for name in begin:
        expected = SCALE * (np.array(end[name]) - np.array(begin[name])) / 100
        assert episode.terms[name].sum(axis=0) == pytest.approx(expected, abs=1e-9), name


def test_paired_return_is_the_final_score_minus_the_twins_final_score_minus_rent() -> None:
    episode = busy("paired")
    for env, report in enumerate(episode.reports):
        lead = (report.val_score - twin_scores_again(8, env)[-1]) / 100
        rent = RENT * (report.params - report.host_params) / 1000
        assert episode.rewards[:, env].sum() == pytest.approx(SCALE * (lead - rent), abs=1e-9)
    assert episode.reports[0].params > episode.reports[0].host_params


def test_sparse_return_is_the_final_score_minus_rent_in_the_last_step() -> None:
    episode = busy("sparse")
    assert (episode.rewards[:-1] == 0.0).all()
    expected = [
        SCALE * (r.val_score / 100 - RENT * (r.params - r.host_params) / 1000) for r in episode.reports
    ]
    assert episode.rewards[-1].tolist() == pytest.approx(expected)


def test_return_of_the_loss_family_is_the_total_decrease_of_the_loss() -> None:
    episode = idle("loss")
    won = (episode.facts[0].val_loss - episode.facts[-1].val_loss) / episode.guess_losses
    assert episode.rewards.sum(axis=0) == pytest.approx(SCALE * won)
    assert (won > 0.0).any(), "training improves the host"


def test_contribution_reward_is_zero_in_an_episode_without_growth() -> None:
    episode = idle("contribution")
    assert episode.rewards.tolist() == [[0.0, 0.0]] * 8
    assert all(len(set(report.val_scores)) > 1 for report in episode.reports), "the score changes"


@pytest.mark.parametrize(
    ("family", "rules"), [*((family, INCUBATED) for family in NAMES), ("contribution", AT_ONCE)]
)
def test_return_of_repeated_germinating_and_pruning_does_not_exceed_that_of_no_growth(
    family: FamilyName, rules: LifecycleRules
) -> None:
    """Without incubation only the contribution family is tested, because in other families a seed that
    improves the host before it is pruned may raise the return.
    """
    cycle = [plant(1), action(LifecycleOp.PRUNE, 1), WAIT]
    replanted = played(family, [*cycle, *cycle], task_with(rules))
    assert replanted.reports[0].op_counts[LifecycleOp.PRUNE] == 2
    assert replanted.reports[0].refused == 0
    won = replanted.rewards[:, 0].sum()
    assert won <= idle(family).rewards[:, 0].sum() + 1e-12
    if family == "contribution":
        assert won == pytest.approx(-2 * 0.01 * SCALE), "the cost of two removals"


def test_variance_unpaired_is_reported_for_the_paired_family_and_no_other() -> None:
    assert [name for name in NAMES if busy(name).log.variance_unpaired() is not None] == ["paired"]


def test_paired_reward_with_a_twin_score_of_0_includes_the_progress_of_the_host_itself() -> None:
    episode = idle("paired")
    assert (episode.rewards == 0.0).all()
    drift = np.diff([facts.val_score for facts in episode.facts], axis=0)
    assert np.array(episode.log.unpaired) == pytest.approx(SCALE * drift / 100)
    assert episode.log.variance_unpaired() == pytest.approx(np.var(SCALE * drift / 100))
    assert (episode.log.variance(), episode.log.broken_episodes) == (0.0, 0)


def test_reward_is_the_sum_of_its_terms() -> None:
    assert total(terms((1.0, -0.5), (3.0, 0.25))).tolist() == [0.5, 3.25]
