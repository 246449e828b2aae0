"""A host that diverges gets a penalty and a new attempt, and other environments are not affected."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import count, cycle
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline import LifecycleOp, LifecycleRules, Stage
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.config import TrainingConfig
from esper.simic.rewards.families import FamilyName
from esper.simic.training.policy_env import GrowthEnv, PolicyStep
from esper.simic.training.rollout import ActionStreams, collect, evaluate
from esper.simic.training.trainer import Trainer
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCritic
from esper.tamiyo.policy.features import Observation
from esper.tolaria.env import MorphEnv
from esper.tolaria.tasks.spec import TaskSpec
from esper.tolaria.vector import SerialVector
from tests.simic.oracles.trial import new_policy
from tests.simic.rollouts import TINY, agent_of
from tests.tolaria.building import WAIT, IntArray, action, bits, plant, tiny_task

NAMES: tuple[FamilyName, ...] = get_args(FamilyName)
SCALE = 5.0
PENALTY = 0.2 * SCALE
AT_ONCE = LifecycleRules(min_training_epochs=0, min_prune_age=1, embargo_epochs=1)
HORIZON = 6


TASK = tiny_task(rules=AT_ONCE, horizon=HORIZON)


def growth(family: FamilyName = "paired", task: TaskSpec = TASK, **settings: Any) -> GrowthEnv:
    config = TrainingConfig(reward_family=family, rent=0.5, reward_scale=SCALE, **settings)
    return GrowthEnv(task, config, rng_seed=3, env_indices=range(3))


def break_down(env: GrowthEnv | SerialVector, row: int, steps: Collection[int]) -> None:
    """Make the host of environment ``row`` diverge in ``steps``, counted over all its episodes."""
    vector = env.vector if isinstance(env, GrowthEnv) else env
    victim, number = vector.envs[row], count()
    begin_step = victim.begin_step

    def fragile(action: IntArray) -> None:
        if next(number) in steps:
            poison_host(victim, math.nan)
        begin_step(action)

    victim.begin_step = fragile  # type: ignore[method-assign]


def poison_host(env: MorphEnv, value: float) -> None:
    with torch.no_grad():
        next(env.model.host.parameters()).view(-1)[0] = value


BUSY = {0: plant(1), 1: plant(0), 2: action(LifecycleOp.PRUNE, 0)}


def actions_at(step: int, script: Mapping[int, IntArray], num_envs: int) -> NDArray[np.int64]:
    return np.stack([script.get(step, WAIT)] * num_envs)


def play(
    env: GrowthEnv, script: Mapping[int, IntArray] = BUSY, before: Callable[[int], None] = lambda step: None
) -> list[PolicyStep]:
    """Run one episode with the same actions in every environment: ``script`` by step number, else WAIT."""
    env.reset()
    steps = []
    for number in range(env.horizon):
        before(number)
        steps.append(env.step(actions_at(number, script, len(env.env_indices))))
    return steps


def second_attempt(env: GrowthEnv) -> Observation:
    """Start the second attempt at episode 0 in every environment."""
    with pytest.MonkeyPatch.context() as patch:
        reset = env._reset_envs

        def again(rows: Sequence[int]) -> None:
            env._attempts = [1] * len(rows)
            reset(rows)

        patch.setattr(env, "_reset_envs", again)
        return env.reset()


def column(steps: Sequence[PolicyStep], name: str, row: int) -> list[Any]:
    return [getattr(step, name)[row].item() for step in steps]


# --- rewards, other environments, and the attempt after a divergence ----------------------------------


@pytest.mark.parametrize("family", NAMES)
def test_rewards_of_a_diverged_attempt_sum_to_the_penalty_plus_prune_costs(family: FamilyName) -> None:
    env = growth(family)
    break_down(env, 1, {3})
    steps = play(env)
    rewards = column(steps, "reward", 1)
    churn = 0.01 * SCALE if family == "contribution" else 0.0
    assert sum(rewards[:4]) == pytest.approx(-PENALTY - churn, abs=1e-9)
    assert family != "loss" or abs(sum(rewards[:3])) > 1e-3, "there were gains before"
    assert column(steps, "ended", 1) == column(steps, "terminated", 1)
    assert column(steps, "ended", 1) == [False, False, False, True, False, False]
    penalties = [terms["rollback"].tolist() for terms in env.reward_log.terms]
    assert penalties == [[0.0, -PENALTY if step == 3 else 0.0, 0.0] for step in range(HORIZON)]


@pytest.mark.parametrize(("family", "value"), list(zip(NAMES, cycle([math.nan, math.inf]))))
def test_non_finite_host_weight_ends_the_episode_in_its_environment_and_no_other(
    family: FamilyName, value: float
) -> None:
    env = growth(family)

    def poison(step: int) -> None:
        if step == 4:
            poison_host(env.vector.envs[1], value)

    steps = play(env, {0: plant(1)}, poison)
    assert column(steps, "terminated", 1) == [False] * 4 + [True, False]
    assert sum(column(steps, "reward", 1)[:5]) == pytest.approx(-PENALTY, abs=1e-9)
    assert column(steps, "ended", 0) == column(steps, "ended", 2) == [False] * 5 + [True]
    assert all(np.isfinite(step.reward).all() for step in steps)
    assert all(step.observation.features.isfinite().all() for step in steps)
    assert all(p.isfinite().all() for p in env.vector.envs[1].model.parameters()), "a new host"


def test_divergence_in_the_last_epoch_terminates_the_episode_even_if_the_horizon_is_a_truncation() -> None:
    env = growth(horizon_terminates=False)
    break_down(env, 1, {HORIZON - 1})
    steps = play(env)
    assert column(steps, "ended", 1) == column(steps, "terminated", 1) == [False] * 5 + [True]
    assert column(steps, "terminated", 0) == [False] * 6
    assert sum(column(steps, "reward", 1)) == pytest.approx(-PENALTY, abs=1e-9)
    assert (len(env.reports), env.reward_log.broken_episodes) == (2, 1)


def test_prune_in_an_epoch_in_which_the_host_diverges_costs_no_reward() -> None:
    env = growth("contribution")
    break_down(env, 1, {2})
    play(env)
    assert [terms["churn"].tolist() for terms in env.reward_log.terms][2] == [
        -0.01 * SCALE,
        0.0,
        -0.01 * SCALE,
    ]


def test_reward_log_counts_the_diverged_episodes_of_each_rollout() -> None:
    whole, env = growth(), growth()
    play(whole)
    break_down(env, 0, {1})
    break_down(env, 2, {0, 3, 4})
    steps = play(env)
    sums = [np.sum(list(terms.values()), axis=0) for terms in env.reward_log.terms]
    assert np.array(sums) == pytest.approx(np.array([step.reward for step in steps]), abs=1e-12)
    assert (env.reward_log.broken_episodes, env.reports) == (4, [whole.reports[1]])
    play(env)
    assert (env.reward_log.broken_episodes, len(env.reports)) == (0, 3)


@pytest.mark.parametrize("family", ["paired", "contribution"])
def test_divergence_in_one_environment_does_not_change_training_in_other_environments(
    family: FamilyName,
) -> None:
    whole, broken = growth(family), growth(family)
    break_down(broken, 1, {2, 4})
    for one, other in zip(play(whole), play(broken), strict=True):
        for row in (0, 2):
            assert torch.equal(one.observation.features[row], other.observation.features[row])
            assert torch.equal(one.observation.masks.slot_by_op[row], other.observation.masks.slot_by_op[row])
            assert (one.reward[row], one.ended[row]) == (other.reward[row], other.ended[row])
    for row in (0, 2):
        ours, theirs = whole.vector.envs[row], broken.vector.envs[row]
        assert bits(ours.model.state_dict()) == bits(theirs.model.state_dict())
        assert bits(ours.table) == bits(theirs.table)


def test_facts_after_a_diverged_epoch_are_those_of_the_restored_state() -> None:
    vector = SerialVector(TASK, rng_seed=3, env_indices=range(2), rollback_limit=1)
    break_down(vector, 1, {1})
    untrained = vector.reset()
    vector.step(np.stack([WAIT, plant(1)]))
    after = vector.step(np.stack([WAIT, action(LifecycleOp.PRUNE, 1)]))
    assert after.rolled_back.tolist() == after.ended.tolist() == [False, True]
    assert (after.last_op[1], after.epoch.tolist()) == (LifecycleOp.PRUNE, [2, 2])
    for name in ("val_loss", "val_score", "params", "grown_params"):
        assert getattr(after, name)[1] == getattr(untrained, name)[1]


def test_observation_after_a_divergence_is_the_first_observation_of_the_next_attempt() -> None:
    env, fresh = growth(), growth()
    break_down(env, 1, {3})
    seen = play(env)[3].observation
    expected = second_attempt(fresh)
    assert torch.equal(seen.features[1], expected.features[1])
    assert torch.equal(seen.blueprint_indices[1], expected.blueprint_indices[1])
    assert torch.equal(seen.masks.slot_by_op[1], expected.masks.slot_by_op[1])
    assert not torch.equal(seen.features[1], growth().reset().features[1]), "not the first attempt again"
    assert (seen.blueprint_indices[0] >= 0).any(), "other environments continue"


@pytest.mark.parametrize("family", ["paired", "contribution"])
def test_second_attempt_at_an_episode_has_the_rewards_of_an_episode_without_divergence(
    family: FamilyName,
) -> None:
    env, alone = growth(family), growth(family)
    break_down(env, 1, {1})
    steps = play(env, {0: plant(1), 2: plant(2), 4: plant(0)})
    second_attempt(alone)
    for number in range(2, HORIZON):
        expected = alone.step(actions_at(number, {2: plant(2), 4: plant(0)}, 3))
        assert steps[number].reward[1] == expected.reward[1]
        assert torch.equal(steps[number].observation.features[1], expected.observation.features[1])
    assert (env.vector.table.stage[1] != Stage.DORMANT).sum() == 2


def test_reward_of_a_second_attempt_compares_with_the_do_nothing_twin_of_that_attempt() -> None:
    env = growth(task=tiny_task(horizon=HORIZON, batches_per_epoch=8))
    break_down(env, 0, {2})
    break_down(env, 1, {0, 1})
    rewards = column(play(env, {}), "reward", 1)
    assert rewards == [-PENALTY, -PENALTY, 0.0, 0.0, 0.0, 0.0]
    second, third = env.vector.envs[:2]
    assert (third._key().attempt, third.epoch) == (2, 4)
    assert len(set(third._val_scores)) > 1, "waiting earns nothing although the score changes"
    unpaired = np.array(env.reward_log.unpaired)[:, 0]
    assert abs(unpaired[:2].sum()) > 1e-3
    assert unpaired[:3].sum() == pytest.approx(-PENALTY)
    assert unpaired[3:] == pytest.approx(SCALE * np.diff(second._val_scores) / 100)


# --- rollouts with divergences ------------------------------------------------------------------------


class Episodes(GrowthEnv):
    """Environment that resets itself when an episode reaches its horizon."""

    episodes, steps_taken = 1, 0
    seen: Observation
    """Observation that follows the last step of the rollout."""

    def step(self, actions: NDArray[np.int64], outputs: Any = None) -> PolicyStep:
        step = super().step(actions, outputs)
        self.steps_taken += 1
        if self.steps_taken % self.horizon == 0 and self.steps_taken < self.episodes * self.horizon:
            over = np.ones_like(step.ended)
            step = PolicyStep(self.reset(), step.reward, over, over)
        self.seen = step.observation
        return step


def rolled(policy: FactoredRecurrentActorCritic, env: Episodes) -> TamiyoRolloutBuffer:
    return collect(env, policy, ActionStreams(0, env.env_indices), env.episodes)


def episodes_of(num_envs: int = 3) -> Episodes:
    return Episodes(TASK, TrainingConfig(reward_scale=SCALE), rng_seed=3, env_indices=range(num_envs))


Rolled = tuple[FactoredRecurrentActorCritic, Episodes, TamiyoRolloutBuffer]


@pytest.fixture(scope="module")
def broken_rollout() -> Rolled:
    """Return a rollout in which the second of three environments diverges in its third step."""
    policy, env = new_policy(TINY, 0), episodes_of()
    break_down(env, 1, {2})
    return policy, env, rolled(policy, env)


def no_memory(policy: FactoredRecurrentActorCritic) -> tuple[Tensor, Tensor]:
    return policy.get_initial_hidden(1)


def test_lstm_state_of_an_environment_is_reset_for_a_new_attempt_after_a_divergence(
    broken_rollout: Rolled,
) -> None:
    policy, _, buffer = broken_rollout
    assert buffer.fresh[1].tolist() == [True, False, False, True, False, False]
    assert buffer.fresh[0].tolist() == [True] + [False] * 5
    values = [
        policy.get_value(buffer.state[[row], 3], buffer.blueprint_indices[[row], 3], no_memory(policy)).item()
        for row in (0, 1)
    ]
    assert buffer.values[1, 3].item() == pytest.approx(values[1], abs=1e-6)
    assert buffer.values[0, 3].item() != pytest.approx(values[0], abs=1e-4), (
        "other environments keep their LSTM state"
    )


def test_divergence_terminates_an_attempt_and_the_unfinished_next_attempt_bootstraps(
    broken_rollout: Rolled,
) -> None:
    policy, env, buffer = broken_rollout
    assert buffer.terminated.nonzero().tolist() == [[0, 5], [1, 2], [2, 5]]
    assert torch.equal(buffer.next_values[:, :-1], buffer.values[:, 1:])
    with torch.no_grad():  # The new attempt of the second environment starts at step 3 of the rollout.
        _, memory = policy.encode(buffer.state[1:2, 3:], buffer.blueprint_indices[1:2, 3:], no_memory(policy))
        beyond = policy.get_value(env.seen.features[1:2], env.seen.blueprint_indices[1:2], memory).item()
    assert abs(beyond) > 1e-3
    assert buffer.next_values[1, -1].item() == pytest.approx(beyond, abs=1e-6)


@pytest.mark.parametrize(("critic", "conditioned"), [("state_value", True), ("op_value", False)])
def test_update_reproduces_stored_log_probs_of_a_rollout_with_finished_and_diverged_episodes(
    critic: str, conditioned: bool
) -> None:
    policy = new_policy(replace(TINY, critic=critic, conditioned=conditioned), 0)
    env = episodes_of(4)
    env.episodes = 2
    break_down(env, 1, {2, 3, 8})
    break_down(env, 2, {0})
    break_down(env, 3, {HORIZON - 1, 2 * HORIZON - 1})
    buffer = rolled(policy, env)
    ends = [[step for step, ended in enumerate(row) if ended] for row in buffer.ended.tolist()]
    assert ends == [[5, 11], [2, 3, 5, 8], [0, 5, 11], [5, 11]]
    metrics = agent_of(policy).update(buffer, 0.0)
    assert metrics.skipped is None
    assert metrics.first_ratio_error < 1e-5
    assert metrics.explosion is None


def test_divergence_does_not_change_decisions_and_rewards_of_other_environments(
    broken_rollout: Rolled,
) -> None:
    policy, _, other = broken_rollout
    one = rolled(policy, episodes_of())
    for name in ("state", "actions", "log_probs", "values", "rewards", "ended", "terminated", "fresh"):
        ours, theirs = getattr(one, name), getattr(other, name)
        assert torch.equal(ours[[0, 2]], theirs[[0, 2]]), name
    assert not torch.equal(one.rewards[1], other.rewards[1])


# --- evaluation and training -----------------------------------------------------------------------


def test_evaluation_return_includes_the_diverged_attempt_and_not_the_attempt_after_it() -> None:
    policy = new_policy(TINY, 0)
    whole, broken = growth("loss"), growth("loss")
    break_down(broken, 1, {2})
    expected, found = evaluate(whole, policy), evaluate(broken, policy)
    assert found[1] == pytest.approx(-PENALTY, abs=1e-9)
    assert abs(sum(terms["loss"][1] for terms in broken.reward_log.terms)) > 1e-3, (
        "the next episode had a reward"
    )
    assert found[[0, 2]].tolist() == expected[[0, 2]].tolist()
    assert len(broken.reports) == 2


def trainer_of() -> Trainer:
    few = {"envs": 2, "iterations": 2, "hidden_dim": 16, "evaluate_episodes": 2, "evaluate_every": 1}
    return Trainer(TASK, TrainingConfig(**few, update_epochs=1))


def test_evaluation_score_is_the_mean_score_of_episodes_that_reached_the_horizon() -> None:
    trainer, undisturbed = trainer_of(), trainer_of()
    break_down(trainer._selection[0], 0, {1})
    mean_return, score = trainer.evaluate()
    whole_return, _ = undisturbed.evaluate()
    first, second = undisturbed._selection[0].reports
    assert score == second.val_score
    assert first.val_score != second.val_score
    assert mean_return != whole_return
    assert math.isfinite(mean_return)


def test_evaluation_scores_are_none_if_every_episode_diverged() -> None:
    trainer = trainer_of()
    for env in (trainer._selection[0], trainer._training[0]):
        break_down(env, 0, {1})
        break_down(env, 1, {2})
    summary = trainer.run_iteration().update
    assert summary.evaluation_return == pytest.approx(-PENALTY, abs=1e-9)
    assert (summary.evaluation_score, summary.val_score, summary.params) == (None, None, None)
    assert summary.broken_episodes == 2
    assert summary.skipped is None
    assert summary.first_ratio_error is not None
    assert summary.first_ratio_error < 1e-5


def test_update_row_counts_the_diverged_episodes_of_its_iteration() -> None:
    trainer = trainer_of()
    break_down(trainer._training[0], 1, {2})
    first, second = (iteration.update for iteration in trainer)
    assert (first.broken_episodes, second.broken_episodes) == (1, 0)
    assert first.reward_terms["rollback"] == pytest.approx(-PENALTY / 2)
    assert second.reward_terms["rollback"] == 0.0
    assert sum(first.reward_terms.values()) == pytest.approx(first.mean_return, abs=1e-5)
