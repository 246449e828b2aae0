"""Gymnasium environment of Esper: Gymnasium's environment checker, and training with sb3-contrib."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from esper.leyline import (
    CANONICAL_ACTION,
    HEAD_NAMES,
    OP_GERMINATE,
    OP_NAMES,
    OP_WAIT,
    BlueprintAction,
    EsperError,
    FactoredAction,
    Head,
    Stage,
)
from esper.leyline.errors import InvalidActionError
from esper.leyline.factored_actions import HEADS_OF_OP
from esper.tolaria.tasks import TaskSpec, module_task

gymnasium = pytest.importorskip("gymnasium")
sb3_contrib = pytest.importorskip("sb3_contrib")

from gymnasium.utils.env_checker import check_env  # noqa: E402
from sb3_contrib.common.maskable.utils import get_action_masks  # noqa: E402

import esper.gym  # noqa: E402

JOINT = pytest.mark.parametrize("joint", [False, True], ids=["heads", "joint"])


class ConvThenLinear(nn.Module):
    """Network with slots of two topologies: feature maps after ``conv``, features after ``hidden``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.hidden, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(self.conv(x).mean((2, 3))))


def small_task() -> TaskSpec:
    images = torch.randn(160, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    labels, sizes = torch.arange(160) % 3, {"batch_size": 16, "batches_per_epoch": 1}
    return module_task(ConvThenLinear, images, labels, name="small", **sizes)


def made(**settings: Any) -> Any:
    """Return an environment of three short steps, whose episodes need no do-nothing twin."""
    known = {"task": small_task, "steps": 3, "reward_family": "sparse"}
    return gymnasium.make(esper.gym.ENV_ID, **(known | settings))


def masked(env, head: int) -> np.ndarray:
    """Return the action mask of one action head."""
    sizes = env.action_space.nvec
    return np.split(env.unwrapped.action_masks(), np.cumsum(sizes)[:-1])[head]


def played(env: Any, seed: int) -> list[Any]:
    """Return the results of all steps of an episode of random actions under the masks."""
    _, info = env.reset(seed=seed)
    env.action_space.seed(seed)
    steps = [(None, 0.0, False, False, info)]
    while not (steps[-1][2] or steps[-1][3]):
        steps.append(env.step(env.action_space.sample(steps[-1][4]["action_mask"])))
    return steps[1:]


def joint_action(env: Any, triple: list[int]) -> int:
    """Return the number of the joint action with these indices of op, slot and blueprint."""
    return int(np.flatnonzero((env.unwrapped.joint_actions[:, :3] == triple).all(axis=1)).item())


@JOINT
def test_gymnasium_checker_accepts_the_environment(joint: bool):
    check_env(made(joint=joint).unwrapped)


def test_gymnasium_episode_ends_with_a_report_and_is_reproduced_by_its_rng_seed():
    first, second = (played(made(), seed=7) for _ in range(2))
    assert [(ended or cut, "report" in info) for *_, ended, cut, info in first] == [
        *[(False, False)] * 2,
        (True, True),
    ]
    report = first[-1][-1]["report"]
    assert report["params"] >= report["host_params"]
    assert [reward for _, reward, *_ in first] == [reward for _, reward, *_ in second]
    assert all(np.array_equal(a, b) for (a, *_), (b, *_) in zip(first, second, strict=True))


def test_gymnasium_action_masks_allow_legal_values_and_fix_heads_that_no_legal_op_reads():
    env = made(task="digits_impaired")
    _, info = env.reset(seed=0)

    # While all slots are empty, only WAIT and GERMINATE are legal, and all action heads used by GERMINATE are
    # free.
    assert np.flatnonzero(masked(env, Head.OP)).tolist() == [OP_WAIT, OP_GERMINATE]
    assert masked(env, Head.SLOT).all()
    for head in range(Head.BLUEPRINT, len(CANONICAL_ACTION)):
        choices = np.flatnonzero(masked(env, head)).tolist()
        assert (choices == [CANONICAL_ACTION[head]]) == (not HEADS_OF_OP[OP_GERMINATE, head]), head
    # The blueprint with index 0, "none", is never legal.
    assert not masked(env, Head.BLUEPRINT)[0]
    assert np.array_equal(np.concatenate(info["action_mask"]), env.unwrapped.action_masks())


def test_joint_action_mask_allows_exactly_the_actions_that_succeed():
    env = made(joint=True, steps=8)
    _, info = env.reset(seed=0)
    actions, growing = env.unwrapped.joint_actions, env.unwrapped._env.vector.envs[0]
    plan = {0: [OP_GERMINATE, 0, BlueprintAction.CONV_LIGHT], 1: [OP_GERMINATE, 1, BlueprintAction.MLP]}
    legal: set[FactoredAction] = set()
    for epoch in range(7):
        if epoch in (0, 6):
            start, succeeded = growing.state(), []
            for heads in actions:
                growing.begin_step(heads)
                succeeded.append(growing.recorder.refused == 0)
                growing.load_state(start)
            assert succeeded == info["action_mask"].astype(bool).tolist()
            legal |= {FactoredAction.from_indices(heads) for heads in actions[succeeded]}
        *_, info = env.step(joint_action(env, plan.get(epoch, [OP_WAIT, 0, 0])))
    assert {each.op.name for each in legal} == set(OP_NAMES) - {"ADVANCE"}
    # Blueprints of feature maps do not fit the second slot, and those of tokens do not fit the first.
    planted = [{each.blueprint_id for each in legal if each.is_germinate and each.slot == i} for i in (0, 1)]
    assert "conv_light" in planted[0] - planted[1]
    assert "mlp" in planted[1] - planted[0]


@pytest.mark.parametrize(
    ("joint", "action"), [(True, -1), (True, 35), (False, [0, 2, 0, 0, 1, 2, 0, 0]), (False, [0, 0])]
)
def test_action_outside_of_the_action_space_is_refused_with_the_space(joint: bool, action: Any):
    env = made(joint=joint, hold_heads=["style"])
    env.reset(seed=0)
    space = r"Discrete\(35\)" if joint else r"MultiDiscrete\("
    with pytest.raises(InvalidActionError, match=f"^action .* is not in {space}"):
        env.unwrapped.step(action if joint else np.array(action))


@JOINT
def test_held_heads_have_one_legal_value_which_replaces_the_choice_of_the_agent(joint: bool):
    env = made(joint=joint, hold_heads=["slot", "blueprint", "style"])
    env.reset(seed=0)
    if joint:
        action = joint_action(env, [OP_GERMINATE, 1, BlueprintAction.MLP])
        legal = env.unwrapped.joint_actions[env.unwrapped.action_masks()]
        assert legal[:, :3].tolist() == [[0, 0, 0], [1, 0, 1]]
    else:
        action = np.array([OP_GERMINATE, 1, BlueprintAction.MLP, 3, 0, 0, 0, 0])
        for head, value in ((Head.SLOT, 0), (Head.BLUEPRINT, 1), (Head.STYLE, 0)):
            assert np.flatnonzero(masked(env, head)).tolist() == [value], HEAD_NAMES[head]
    env.step(action)
    first, second = env.unwrapped._env.vector.envs[0].reports()
    assert (first.blueprint_id, first.style_id) == ("conv_light", "linear_add")
    assert second.stage is Stage.DORMANT


@JOINT
def test_maskable_ppo_of_sb3_contrib_trains_on_the_gymnasium_environment(joint: bool):
    env = made(joint=joint)
    agent = sb3_contrib.MaskablePPO("MlpPolicy", env, n_steps=6, batch_size=6, n_epochs=1, seed=0)
    before = [parameter.detach().clone() for parameter in agent.policy.parameters()]
    agent.learn(6)

    assert agent.num_timesteps == 6
    assert any((a != b).any() for a, b in zip(before, agent.policy.parameters(), strict=True))
    seen, _ = env.reset(seed=1)
    action, _ = agent.predict(seen, action_masks=get_action_masks(env))
    assert env.action_space.contains(action)
    env.step(action)


def test_spec_has_the_horizon_as_max_episode_steps_and_a_lower_limit_truncates_episodes():
    assert made(steps=4).spec.max_episode_steps == 4
    env = made(max_episode_steps=2)
    assert env.spec.max_episode_steps == 2
    for _ in range(2):
        assert [(ended, cut) for *_, ended, cut, _ in played(env, seed=0)] == [(False, False), (False, True)]


def test_render_mode_ansi_shows_epoch_and_slots_as_text():
    env = made(render_mode="ansi", hold_heads=["slot"])
    env.reset(seed=0)
    env.step(np.array([OP_GERMINATE, 0, BlueprintAction.NORM, 0, 0, 0, 0, 0]))
    first, _, *slots = env.render().splitlines()
    assert first.startswith("epoch 1 of 3: validation score ")
    assert [line.split()[:3] for line in slots] == [["conv", "BLENDING", "norm"], ["hidden", "DORMANT", "–"]]


@pytest.mark.filterwarnings("ignore:.*render_mode='human'")
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"stepz": 3}, "unknown setting 'stepz'; did you mean steps"),
        ({"learning_rate": 0.1, "envs": 8}, "training of a policy: learning_rate, envs; leave them out"),
        ({"hold_heads": ["pace"]}, "found 'pace'"),
        ({"render_mode": "human"}, "unknown render mode 'human'. Allowed: ansi"),
    ],
)
def test_gymnasium_environment_refuses_settings_that_it_does_not_have(
    settings: dict[str, Any], sentence: str
):
    with pytest.raises(EsperError, match=sentence):
        made(**settings)
