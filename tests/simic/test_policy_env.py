from collections.abc import Iterator

import numpy as np
import pytest
import torch

from esper.leyline import LifecycleOp, LifecycleRules
from esper.leyline.factored_actions import IntArray
from esper.simic.config import TrainingConfig
from esper.simic.rewards.families import FamilyName
from esper.simic.training.policy_env import GrowthEnv
from esper.simic.training.rollout import ActionStreams, collect
from esper.tolaria.devices import Compute, Device
from esper.tolaria.env import EpisodeReport
from esper.tolaria.tasks.spec import TaskSpec
from esper.tolaria.twin import TwinOf, run_without_growth
from tests.simic.oracles.trial import new_policy
from tests.simic.rollouts import TINY
from tests.tolaria.building import WAIT, plant, tiny_task

RENT, SCALE = 0.5, 5.0
AT_ONCE = LifecycleRules(min_training_epochs=0, min_prune_age=1, embargo_epochs=1)
"""Lifecycle rules without incubation: seeds reach HOLDING within four epochs."""


@pytest.fixture
def task() -> TaskSpec:
    return tiny_task(rules=AT_ONCE, horizon=4)


def growth(task: TaskSpec, num_envs: int = 2) -> GrowthEnv:
    config = TrainingConfig(rent=RENT, reward_scale=SCALE)
    return GrowthEnv(task, config, rng_seed=3, env_indices=range(num_envs))


def play(env: GrowthEnv, script: Iterator[IntArray]) -> np.ndarray:
    """Return the rewards ``[step, env]`` of an episode with ``script`` in the first environment."""
    env.reset()
    return np.array([env.step(np.stack([row, WAIT])).reward for row in script])


def final_potential(task: TaskSpec, report: EpisodeReport, env: int, episode: int) -> float:
    """Return (final score − do-nothing twin's final score) / 100 − rent, without the cache of twin scores."""
    twin = run_without_growth(task, rng_seed=3, env=env, episode=episode)
    return (report.val_score - twin.val_score) / 100 - RENT * (report.params - report.host_params) / 1000


def test_rewards_of_an_episode_do_not_depend_on_the_previous_episode(task: TaskSpec) -> None:
    env = growth(task)
    grown = play(env, iter([plant(1), WAIT, WAIT, WAIT]))
    assert abs(grown[:, 0].sum()) > 1e-3
    assert play(env, iter([WAIT] * 4)).tolist() == [[0.0, 0.0]] * 4


def test_return_of_every_episode_is_its_final_score_minus_the_twins_final_score_minus_rent(
    task: TaskSpec,
) -> None:
    env, policy, streams = growth(task, 4), new_policy(TINY, 0), ActionStreams(0, range(4))
    for episode in range(2):
        buffer = collect(env, policy, streams)
        assert buffer.ended.tolist() == [[False, False, False, True]] * 4
        assert len(buffer.actions[..., 0].unique()) > 1, "several ops were chosen"
        expected = [
            SCALE * final_potential(task, report, index, episode) for index, report in enumerate(env.reports)
        ]
        assert buffer.rewards.sum(dim=1).tolist() == pytest.approx(expected, abs=1e-5)
        assert buffer.rewards.abs().max() > 1e-3


def test_reset_starts_the_next_episode_or_the_episode_set_in_next_episode(task: TaskSpec) -> None:
    env = growth(task)
    first, second = env.reset().features.clone(), env.reset().features.clone()
    assert not torch.equal(first, second)
    env.next_episode = 0
    assert torch.equal(env.reset().features, first)
    assert torch.equal(env.reset().features, second)


def test_first_observation_of_an_episode_has_last_op_wait_and_constant_histories(task: TaskSpec) -> None:
    features = growth(task).reset().features
    assert features[:, 24:31].tolist() == [[1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]] * 2
    assert features[:, 0].tolist() == [0.0, 0.0]
    histories = features[0, 7:17]
    assert (histories[:5] == features[0, 1]).all(), "all five entries are the loss of the untrained host"
    assert (histories[5:] == features[0, 3]).all()


def test_observation_has_the_blueprints_and_legal_slots_of_each_environment(task: TaskSpec) -> None:
    env = growth(task)
    env.reset()
    observation = env.step(np.stack([plant(1), WAIT])).observation
    assert observation.features.shape == (2, 121)
    assert observation.blueprint_indices.tolist() == [[-1, 1, -1], [-1, -1, -1]]
    assert observation.masks.slot_by_op[:, LifecycleOp.GERMINATE].tolist() == [
        [True, False, True],
        [True] * 3,
    ]
    assert (env.horizon, list(env.env_indices)) == (4, [0, 1])


@pytest.mark.parametrize("terminates", [True, False])
def test_horizon_terminates_or_truncates_an_episode_as_configured(task: TaskSpec, terminates: bool) -> None:
    config = TrainingConfig(horizon_terminates=terminates)
    env = GrowthEnv(task, config, rng_seed=3, env_indices=range(2))
    env.reset()
    steps = [env.step(np.stack([WAIT, WAIT])) for _ in range(4)]
    assert [step.ended.tolist() for step in steps] == [[False] * 2] * 3 + [[True] * 2]
    assert [step.terminated.tolist() for step in steps] == [[False] * 2] * 3 + [[terminates] * 2]
    assert steps[-1].observation.features[:, 0].tolist() == [1.0, 1.0], "the last observation of this episode"
    assert len(env.reports) == 2


@pytest.mark.parametrize(
    ("family", "calls"), [("paired", 1), ("contribution", 0), ("loss", 0), ("sparse", 0)]
)
def test_do_nothing_twins_are_run_only_for_reward_families_that_need_them(
    family: FamilyName, calls: int, task: TaskSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def counted(task: TaskSpec, episodes: list[TwinOf], *, rng_seed: int) -> list[list[float]]:
        asked.append((rng_seed, episodes))
        return [[0.0] * (task.horizon + 1)] * len(episodes)

    monkeypatch.setattr("esper.simic.training.policy_env.twin_scores", counted)
    config = TrainingConfig(reward_family=family, devices=("cpu:0", "cpu:1"))
    env = GrowthEnv(task, config, rng_seed=3, env_indices=(4, 7))
    env.next_episode = 5
    env.reset()
    twins = [TwinOf(4, 5, 0, Compute(Device("cpu:0"))), TwinOf(7, 5, 0, Compute(Device("cpu:1")))]
    assert asked == [(3, twins)][:calls]
