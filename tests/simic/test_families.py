"""Reward families: in numbers worked out by hand, and through the real loop with networks that grow."""

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
    RewardTerms,
    total,
)
from esper.simic.rewards.reward_log import RewardLog
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


# --- by hand ---------------------------------------------------------------------------------------

TABLE = SlotTable.empty(1, 3)


def inputs(*, twin: float = 0.0, table: SlotTable = TABLE, price: float = 0.0, **facts: Any) -> RewardInputs:
    """One environment, at a task whose blind guess loses 2.0."""
    stacked = EpochFacts.stack([replace(env_facts(), **facts)])
    return RewardInputs(stacked, table, np.array([twin]), guess_loss=2.0, rent=price)


def rewarded(family: FamilyName, *steps: RewardInputs, scale: float = 1.0) -> list[dict[str, float]]:
    """The reward terms of every step, as plain numbers."""
    reward_function = RewardFunction(FAMILIES[family], scale)
    reward_function.begin(steps[0])
    ledgers = [reward_function.reward_terms(now) for now in steps[1:]]
    return [{name: float(value[0]) for name, value in ledger.items()} for ledger in ledgers]


def test_paired_pays_the_change_of_the_lead_and_charges_rent() -> None:
    found = rewarded(
        "paired",
        inputs(val_score=12.0, twin=10.0, price=0.02),
        inputs(val_score=30.0, twin=20.0, grown_params=500, price=0.02),  # lead 2 → 10, 500 · 0.02 / 1000
        inputs(val_score=30.0, twin=35.0, grown_params=100, price=0.02),  # lead 10 → −5, rent 0.01 → 0.002
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


def test_contribution_pays_the_change_of_what_blended_seeds_are_worth() -> None:
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


def test_loss_pays_improvement_in_blind_guesses() -> None:
    losses = (2.0, 1.5, 1.8)
    found = rewarded("loss", *(inputs(val_loss=loss) for loss in losses), scale=5.0)
    assert [ledger["loss"] for ledger in found] == pytest.approx([1.25, -0.75])


def test_log_loss_pays_the_fall_of_the_logarithm_whatever_the_scale_of_the_loss() -> None:
    found = rewarded("log_loss", *(inputs(val_loss=loss) for loss in (2.0, 1.0, 0.1, 0.0)), scale=5.0)
    # 5 · ln 2, 5 · ln 10, and from 0.1 down to the least loss of 0.001: 5 · ln 100
    assert [ledger["log_loss"] for ledger in found] == pytest.approx([3.46574, 11.51293, 23.02585], abs=1e-5)


def test_sparse_pays_nothing_before_the_end() -> None:
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
def test_churn_is_due_for_a_prune_that_succeeded_and_for_nothing_else(
    op: LifecycleOp, succeeded: bool
) -> None:
    [found] = rewarded("contribution", inputs(), inputs(last_op=op, last_success=succeeded))
    assert found["churn"] == (-0.01 if op is LifecycleOp.PRUNE and succeeded else 0.0)


@pytest.mark.parametrize("family", [name for name in NAMES if name != "contribution"])
def test_no_other_family_charges_for_a_prune(family: FamilyName) -> None:
    assert rewarded(family, inputs(), inputs()) == rewarded(
        family, inputs(), inputs(last_op=LifecycleOp.PRUNE)
    )


def test_an_episode_that_breaks_down_loses_what_it_had_gained_and_gets_the_penalty() -> None:
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


def test_a_sparse_episode_that_breaks_down_gets_no_score() -> None:
    [found] = rewarded(
        "sparse", inputs(), inputs(val_score=90.0, grown_params=99, ended=True, rolled_back=True)
    )
    assert found == {"score": 0.0, "rent": 0.0, "rollback": -0.2}


def two(first: float, second: float, **facts: Any) -> RewardInputs:
    """Two environments that lead their twins by so many points."""
    rows = [replace(env_facts(), val_score=score, **facts) for score in (first, second)]
    return RewardInputs(EpochFacts.stack(rows), SlotTable.empty(2, 3), np.zeros(2), 2.0, 0.0)


def test_an_episode_that_begins_again_owes_nothing_and_its_neighbour_goes_on() -> None:
    reward_function = RewardFunction(FAMILIES["paired"], 1.0)
    reward_function.begin(two(10.0, 20.0))
    reward_function.reward_terms(two(40.0, 30.0))
    reward_function.begin_again(1, two(99.0, 5.0))
    assert reward_function.reward_terms(two(41.0, 8.0))["lead"].tolist() == pytest.approx([0.01, 0.03])


def test_a_second_breakdown_forfeits_what_the_second_episode_had_won() -> None:
    reward_function = RewardFunction(FAMILIES["paired"], 1.0)
    reward_function.begin(two(10.0, 20.0))
    reward_function.begin_again(1, two(10.0, 5.0))
    reward_function.reward_terms(two(10.0, 9.0))
    broken = reward_function.reward_terms(two(10.0, 9.0, ended=True, rolled_back=True))
    assert broken["lead"].tolist() == pytest.approx([0.0, -0.04])


def test_families_discount_as_their_returns_are_meant() -> None:
    assert {name: family.gamma for name, family in FAMILIES.items()} == {
        "paired": 1.0,
        "contribution": 0.995,
        "loss": 0.995,
        "log_loss": 1.0,
        "sparse": 1.0,
    }
    assert [name for name, family in FAMILIES.items() if family.needs_twin] == ["paired"]


# --- reward_log -----------------------------------------------------------------------------------------


def terms(*pairs: tuple[float, float]) -> RewardTerms:
    lead, rent = zip(*pairs, strict=True)
    return {"lead": np.array(lead), "rent": np.array(rent)}


def test_the_mean_terms_of_an_environment() -> None:
    reward_log = RewardLog([terms((1.0, -0.5), (3.0, 0.0)), terms((0.0, 0.5), (4.0, -1.0))])
    assert reward_log.mean_terms() == {"lead": 4.0, "rent": -0.5}
    # rewards 0.5, 3, 0.5, 3: half a range of 2.5 from their mean
    assert reward_log.variance() == pytest.approx(1.5625)


def test_the_variance_without_a_twin_is_unknown_where_there_is_no_twin() -> None:
    assert RewardLog([terms((1.0, 0.0))]).variance_unpaired() is None
    assert RewardLog([terms((1.0, 0.0))], [np.array([1.0, 5.0])]).variance_unpaired() == 4.0


def test_logs_of_shards_are_joined_side_by_side() -> None:
    one = RewardLog([terms((1.0, 0.0), (2.0, 0.0))], [np.array([1.0, 2.0])], broken_episodes=1)
    other = RewardLog([terms((3.0, -1.0))], [np.array([3.0])], broken_episodes=2)
    joined = RewardLog.join([one, other])
    assert [values.tolist() for values in joined.terms[0].values()] == [[1.0, 2.0, 3.0], [0.0, 0.0, -1.0]]
    assert [values.tolist() for values in joined.unpaired] == [[1.0, 2.0, 3.0]]
    assert joined.broken_episodes == 3


# --- through the real loop -------------------------------------------------------------------------


@pytest.mark.parametrize("family", NAMES)
def test_every_potential_pays_its_own_change_at_every_step_of_a_busy_episode(family: FamilyName) -> None:
    episode = busy(family)
    stages = {int(stage) for table in episode.tables for stage in table.stage.flat}
    assert {Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED, Stage.RESETTING} <= stages
    assert sum(episode.terms.values()) == pytest.approx(episode.rewards, abs=1e-12)
    assert (episode.terms["rollback"] == 0.0).all()
    charged = [name for name, values in episode.terms.items() if (values != 0.0).any()]
    assert set(charged) == set(episode.terms) - {"rollback"}, "every other term has something to say"
    worth = [state_worth(family, episode, epoch) for epoch in range(len(episode.facts))]
    for name in worth[0]:
        expected = SCALE * np.diff([now[name] for now in worth], axis=0) / 100
        assert episode.terms[name] == pytest.approx(expected, abs=1e-9), name


@pytest.mark.parametrize(("rng_seed", "family"), list(zip((1, 2, 3, 6, 6), NAMES, strict=True)))
def test_every_potential_telescopes_over_an_episode_of_any_legal_actions(
    rng_seed: int, family: FamilyName
) -> None:
    episode = played(family, task=task_with(horizon=12), rng_seed=rng_seed)
    counts = np.sum([report.op_counts for report in episode.reports], axis=0)
    assert (counts[[LifecycleOp.GERMINATE, LifecycleOp.PRUNE, LifecycleOp.FOSSILIZE]] > 0).all()
    begin, end = state_worth(family, episode, 0), state_worth(family, episode, len(episode.facts) - 1)
    for name in begin:
        expected = SCALE * (np.array(end[name]) - np.array(begin[name])) / 100
        assert episode.terms[name].sum(axis=0) == pytest.approx(expected, abs=1e-9), name


def test_the_return_of_paired_is_the_final_paired_score_of_the_committed_network() -> None:
    episode = busy("paired")
    for env, report in enumerate(episode.reports):
        lead = (report.val_score - twin_scores_again(8, env)[-1]) / 100
        rent = RENT * (report.params - report.host_params) / 1000
        assert episode.rewards[:, env].sum() == pytest.approx(SCALE * (lead - rent), abs=1e-9)
    assert episode.reports[0].params > episode.reports[0].host_params


def test_sparse_pays_the_final_score_less_rent_and_at_the_last_step_only() -> None:
    episode = busy("sparse")
    assert (episode.rewards[:-1] == 0.0).all()
    expected = [
        SCALE * (r.val_score / 100 - RENT * (r.params - r.host_params) / 1000) for r in episode.reports
    ]
    assert episode.rewards[-1].tolist() == pytest.approx(expected)


def test_the_return_of_loss_is_the_whole_improvement_of_the_loss() -> None:
    episode = idle("loss")
    won = (episode.facts[0].val_loss - episode.facts[-1].val_loss) / episode.guess_losses
    assert episode.rewards.sum(axis=0) == pytest.approx(SCALE * won)
    assert (won > 0.0).any(), "a host that is trained improves"


def test_contribution_never_pays_what_the_host_learns_by_itself() -> None:
    episode = idle("contribution")
    assert episode.rewards.tolist() == [[0.0, 0.0]] * 8
    assert all(len(set(report.val_scores)) > 1 for report in episode.reports), "while the score changes"


@pytest.mark.parametrize(
    ("family", "rules"), [*((family, INCUBATED) for family in NAMES), ("contribution", AT_ONCE)]
)
def test_planting_and_pruning_over_and_over_wins_nothing(family: FamilyName, rules: LifecycleRules) -> None:
    """A seed that was blended has changed the host; only what it contributed is known to be gone."""
    cycle = [plant(1), action(LifecycleOp.PRUNE, 1), WAIT]
    replanted = played(family, [*cycle, *cycle], task_with(rules))
    assert replanted.reports[0].op_counts[LifecycleOp.PRUNE] == 2
    assert replanted.reports[0].refused == 0
    won = replanted.rewards[:, 0].sum()
    assert won <= idle(family).rewards[:, 0].sum() + 1e-12
    if family == "contribution":
        assert won == pytest.approx(-2 * 0.01 * SCALE), "two removals, no more and no less"


def test_only_paired_knows_its_variance_without_the_twin() -> None:
    assert [name for name in NAMES if busy(name).log.variance_unpaired() is not None] == ["paired"]


def test_without_its_twin_paired_would_pay_the_host_s_own_drift() -> None:
    episode = idle("paired")
    assert (episode.rewards == 0.0).all()
    drift = np.diff([facts.val_score for facts in episode.facts], axis=0)
    assert np.array(episode.log.unpaired) == pytest.approx(SCALE * drift / 100)
    assert episode.log.variance_unpaired() == pytest.approx(np.var(SCALE * drift / 100))
    assert (episode.log.variance(), episode.log.broken_episodes) == (0.0, 0)


def test_the_reward_is_a_sum_of_terms() -> None:
    assert total(terms((1.0, -0.5), (3.0, 0.25))).tolist() == [0.5, 3.25]
