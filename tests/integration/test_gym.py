"""Gymnasium environment: checker of Gymnasium, and training by an agent of sb3-contrib."""

import numpy as np
import pytest

from esper.leyline import CANONICAL_ACTION, OP_GERMINATE, OP_WAIT, EsperError, Head
from esper.leyline.factored_actions import HEADS_OF_OP

gymnasium = pytest.importorskip("gymnasium")
sb3_contrib = pytest.importorskip("sb3_contrib")

from gymnasium.utils.env_checker import check_env  # noqa: E402
from sb3_contrib.common.maskable.utils import get_action_masks  # noqa: E402

import esper.gym  # noqa: E402


@pytest.fixture
def env():
    return gymnasium.make(esper.gym.ENV_ID, task="digits_impaired", steps=3, reward_family="sparse")


def masked(env, head: int) -> np.ndarray:
    """Return the part of the mask for one head."""
    sizes = env.action_space.nvec
    return np.split(env.unwrapped.action_masks(), np.cumsum(sizes)[:-1])[head]


def test_the_checker_of_gymnasium_reports_no_problem(env):
    check_env(env.unwrapped)


def test_an_episode_ends_with_a_report_and_is_repeated_by_its_rng_seed(env):
    courses = []
    for _ in range(2):
        env.reset(seed=7)
        env.action_space.seed(7)
        courses.append([env.step(env.action_space.sample()) for _ in range(3)])
    (_, _, *first_flags, first_info), _, (_, _, *flags, info) = courses[0]

    assert (first_flags, first_info) == ([False, False], {})
    assert any(flags)
    assert info["report"]["params"] >= info["report"]["host_params"]
    assert [reward for _, reward, *_ in courses[0]] == [reward for _, reward, *_ in courses[1]]
    assert all(np.array_equal(a, b) for (a, *_), (b, *_) in zip(*courses, strict=True))


def test_masks_allow_legal_actions_and_fix_heads_that_no_legal_op_reads(env):
    env.reset(seed=0)

    # While all slots are empty, only WAIT and GERMINATE are legal, and all action heads used by GERMINATE are
    # free.
    assert np.flatnonzero(masked(env, Head.OP)).tolist() == [OP_WAIT, OP_GERMINATE]
    assert masked(env, Head.SLOT).all()
    for head in range(Head.BLUEPRINT, len(CANONICAL_ACTION)):
        choices = np.flatnonzero(masked(env, head)).tolist()
        assert (choices == [CANONICAL_ACTION[head]]) == (not HEADS_OF_OP[OP_GERMINATE, head]), head
    # The blueprint "none" is never legal.
    assert not masked(env, Head.BLUEPRINT)[0]


def test_maskable_ppo_of_sb3_contrib_trains_on_the_environment(env):
    agent = sb3_contrib.MaskablePPO("MlpPolicy", env, n_steps=6, batch_size=6, n_epochs=1, seed=0)
    before = [parameter.detach().clone() for parameter in agent.policy.parameters()]
    agent.learn(6)

    assert agent.num_timesteps == 6
    assert any((a != b).any() for a, b in zip(before, agent.policy.parameters(), strict=True))
    seen, _ = env.reset(seed=1)
    action, _ = agent.predict(seen, action_masks=get_action_masks(env))
    assert env.action_space.contains(action)


def test_unknown_settings_of_the_environment_are_refused():
    with pytest.raises(EsperError, match="did you mean steps"):
        gymnasium.make(esper.gym.ENV_ID, stepz=3)
