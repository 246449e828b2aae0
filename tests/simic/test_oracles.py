import numpy as np
import pytest
import torch

from esper.leyline import CANONICAL_ACTION, BlueprintAction, Head, LifecycleOp
from esper.leyline.factored_actions import IntArray
from esper.simic.training.rollout import ActionStreams
from tests.simic.oracle_scripts import SCRIPTS, action, follow, plant
from tests.simic.oracles import lifecycle_envs
from tests.simic.oracles.lifecycle_envs import Lifecycle, Scaffold
from tests.simic.oracles.toy_envs import Combination, Distractors, Memory, Timing, slot_column
from tests.simic.oracles.trial import OracleClass, uniform_actions

ORACLES = list(SCRIPTS)


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the measurement noise of the lifecycle oracles to 0."""
    monkeypatch.setattr(lifecycle_envs, "NOISE", 0.0)


@pytest.mark.usefixtures("silence")
@pytest.mark.parametrize("oracle", ORACLES)
def test_optimal_script_reaches_the_optimal_return_of_its_oracle_exactly(oracle: OracleClass) -> None:
    env = oracle(0, range(20))
    returns = follow(env, SCRIPTS[oracle])
    np.testing.assert_allclose(returns, oracle.optimum, atol=1e-9)
    np.testing.assert_allclose(follow(env, SCRIPTS[oracle]), oracle.optimum, atol=1e-9, err_msg="again")


@pytest.mark.parametrize("oracle", [Lifecycle, Scaffold])
def test_measurement_noise_does_not_change_the_mean_return_of_an_oracle(oracle: OracleClass) -> None:
    # Rewards telescope, so a return contains one measurement error. A standard deviation of 2 points of score
    # is one of 5 · 2/100 = 0.1 in the return.
    returns = follow(oracle(0, range(300)), SCRIPTS[oracle])
    assert returns.mean() == pytest.approx(oracle.optimum, abs=3 * 0.1 / 300**0.5)
    assert returns.std() == pytest.approx(0.1, rel=0.15)


@pytest.mark.usefixtures("silence")
@pytest.mark.parametrize("oracle", ORACLES)
def test_returns_of_random_actions_stay_below_the_best_return_of_an_oracle(oracle: OracleClass) -> None:
    env, streams = oracle(1, range(300)), ActionStreams(1, range(300))
    masks, returns = env.reset().masks, np.zeros(300)
    for _ in range(env.horizon):
        step = env.step(uniform_actions(masks, streams.draw()).numpy())
        masks, returns = step.observation.masks, returns + step.reward
    assert returns.max() <= oracle.optimum + 1e-9
    assert returns.mean() < 0.4 * oracle.optimum


@pytest.mark.parametrize("oracle", ORACLES)
def test_oracle_observations_have_the_shape_of_observations_of_growing_networks(oracle: OracleClass) -> None:
    observation = oracle(0, range(3)).reset()
    assert observation.features.shape == (3, 121)
    assert observation.features.dtype == torch.float32
    assert observation.blueprint_indices.tolist() == [[-1, -1, -1]] * 3
    assert observation.masks.slot_by_op.shape == (3, 6, 3)
    assert observation.masks.blueprint.sum(dim=-1).tolist() == [5, 5, 5]


@pytest.mark.parametrize("oracle", [Memory, Combination, Distractors, Lifecycle])
def test_oracle_episode_does_not_depend_on_other_environments(oracle: OracleClass) -> None:
    alone, among = oracle(4, [2]), oracle(4, [0, 1, 2, 3])
    waiting = np.tile(CANONICAL_ACTION, (4, 1))
    seen = [(alone.reset(), among.reset())]
    seen += [(alone.step(waiting[:1]).observation, among.step(waiting).observation) for _ in range(3)]
    for one, many in seen:
        assert torch.equal(one.features[0], many.features[2])
        assert torch.equal(one.masks.slot_by_op[0], many.masks.slot_by_op[2])


# --- rewards of oracles without a lifecycle -----------------------------------------------------------


@pytest.mark.parametrize(
    ("germinate", "fossilize", "pay"),
    [
        (0, 4, 1.0),
        (0, 3, 0.7),  # Fossilizing one step early costs 0.3.
        (0, 5, 0.65),  # Fossilizing one step late costs 0.3 for the waiting time and 0.05 for the delay.
        (1, 5, 0.95),
        (3, 7, 0.85),
        (0, 1, 0.1),
    ],
)
def test_reward_of_the_timing_oracle_depends_on_the_steps_of_germination_and_fossilization(
    germinate: int, fossilize: int, pay: float
) -> None:
    def script(env: Timing, step: int) -> IntArray:
        if step == germinate:
            return plant(env.num_envs, 0)
        return action(env.num_envs, LifecycleOp.FOSSILIZE if step == fossilize else LifecycleOp.WAIT)

    assert follow(Timing(0, [0]), script) == pytest.approx([pay])


def test_memory_oracle_shows_the_correct_slot_at_step_0_and_rewards_it_at_step_50() -> None:
    env = Memory(0, range(30))
    observation = env.reset()
    columns = [slot_column(slot) for slot in range(3)]
    shown = observation.features[:, columns]
    assert shown.argmax(dim=-1).tolist() == env.answer.tolist()
    assert set(env.answer.tolist()) == {0, 1, 2}
    for step in range(50):
        assert observation.masks.op.tolist() == [[True] + [False] * 5] * 30
        assert bool(observation.features[:, columns].any()) is (step == 0)
        observation = env.step(action(30, LifecycleOp.WAIT)).observation
    assert observation.masks.op.tolist() == [[False, True] + [False] * 4] * 30
    assert not observation.features[:, columns].any()


def test_combination_oracle_has_one_legal_op_that_is_not_observed() -> None:
    env = Combination(0, range(200))
    observation = env.reset()
    assert len(observation.features.unique(dim=0)) == 1, "only the time is observed"
    assert observation.masks.op.sum(dim=-1).tolist() == [1] * 200
    assert observation.masks.op.any(dim=0).tolist() == [False, True, True, True, True, False]
    per_op = observation.masks.slot_by_op.sum(dim=-1)
    assert per_op[:, LifecycleOp.GERMINATE].unique().tolist() == [0, 1], "the slot of a germination is forced"
    assert per_op[:, LifecycleOp.PRUNE].unique().tolist() == [0, 3]


# --- rewards of oracles with a lifecycle --------------------------------------------------------------


@pytest.mark.usefixtures("silence")
@pytest.mark.parametrize(
    ("heads", "share"),
    [
        ({}, 1.0),
        ({"style": 1}, 0.7),  # Style LINEAR_MULTIPLY has 0.7 of the contribution of LINEAR_ADD.
        ({"style": 3}, 0.85),
        # A seed at half alpha never reaches HOLDING and is removed at the horizon.
        ({"alpha_target": 0}, 0.0),
    ],
)
def test_reward_of_the_lifecycle_oracle_depends_on_style_and_alpha(
    heads: dict[str, int], share: float
) -> None:
    def script(env: Lifecycle, step: int) -> IntArray:
        return plant(1, 1, BlueprintAction.CONV_LIGHT) if step == 0 else action(1, LifecycleOp.WAIT)

    def varied(env: Lifecycle, step: int) -> IntArray:
        rows = script(env, step)
        for name, value in heads.items():
            rows[:, Head[name.upper()]] = value
        return rows

    rent = 0.003 if share else 0.0
    assert follow(Lifecycle(0, [0]), varied) == pytest.approx([5 * (0.15 * share - rent)])


@pytest.mark.usefixtures("silence")
@pytest.mark.parametrize(
    ("plan", "points"),
    [
        ({2: 2}, 0.0),  # A seed in slot 2 without a scaffold contributes nothing.
        ({0: 2, 2: 0}, 0.0 - 10.0),  # A scaffold that is planted too late costs 10 points.
        ({0: 0, 2: 2}, 30.0 - 10.0),  # A scaffold that is not removed costs 10 points.
        ({0: 0, 2: 2, 4: -1}, 30.0),
    ],
)
def test_scaffold_oracle_needs_a_scaffold_before_the_seed_in_slot_2_and_charges_for_a_kept_one(
    plan: dict[int, int], points: float
) -> None:
    def script(env: Scaffold, step: int) -> IntArray:
        if step not in plan:
            return action(1, LifecycleOp.WAIT)
        return action(1, LifecycleOp.PRUNE, 0) if plan[step] < 0 else plant(1, plan[step])

    seeds = len([slot for slot in plan.values() if slot >= 0]) - sum(slot < 0 for slot in plan.values())
    expected = 5 * (points / 100 - 0.00032 * seeds)
    assert follow(Scaffold(0, [0]), script) == pytest.approx([expected])
