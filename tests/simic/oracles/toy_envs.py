"""Oracle environments with the real action space, masks and observation size, and a known best return.

Oracle environments train no network, so a training run of a policy takes seconds. A learner that does not
reach the best return of an oracle has a bug. The docstring of each oracle class describes its rewards;
``optimum`` is its best return.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from esper.leyline import NUM_BLUEPRINTS, NUM_OPS, BlueprintAction, Head, LifecycleOp, Stage, derive_seed
from esper.leyline.signals import PolicyOutput
from esper.simic.training.policy_env import PolicyStep
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.features import BASE_SIZE, SLOT_SIZE, Observation

Actions = NDArray[np.int64]
Rewards = NDArray[np.float64]
Legal = Mapping[LifecycleOp, bool | NDArray[np.bool_]]
"""Legal slots of every op except WAIT; each value can be broadcast to ``[env, slot]``."""

NUM_SLOTS = 3
_PROGRESS = 0
PARAMS = {
    BlueprintAction.CONV_LIGHT: 150,
    BlueprintAction.NORM: 16,
    BlueprintAction.DEPTHWISE: 60,
    BlueprintAction.CONV_SMALL: 80,
    BlueprintAction.CONV_HEAVY: 2000,
}
"""Number of parameters of a seed of each selectable blueprint."""


class Oracle(ABC):
    """Base class of a vector of oracle environments with episodes of ``horizon`` steps."""

    horizon: int
    optimum: float
    """Expected return of the best policy in this oracle."""

    def __init__(self, rng_seed: int, env_indices: Sequence[int]) -> None:
        self.env_indices = tuple(env_indices)
        self.num_envs = len(self.env_indices)
        self.rngs = [np.random.default_rng(derive_seed(rng_seed, "env", i, "sandbox")) for i in env_indices]
        self.step_number = 0

    def reset(self) -> Observation:
        self.step_number = 0
        self.start()
        return self.observe()

    def step(self, actions: Actions, outputs: Sequence[PolicyOutput] | None = None) -> PolicyStep:
        reward = self.rewards(actions)
        self.step_number += 1
        ended = np.full(self.num_envs, self.step_number == self.horizon)
        observation = self.reset() if ended.all() else self.observe()
        return PolicyStep(observation, reward, ended, ended)

    def start(self) -> None:  # noqa: B027  optional hook
        """Draw the hidden state of a new episode of the oracle."""

    @abstractmethod
    def observe(self) -> Observation:
        """Return the observation of the present step."""

    @abstractmethod
    def rewards(self, actions: Actions) -> Rewards:
        """Apply the actions of all environments and return the rewards ``[env]``."""


class ToyOracle(Oracle):
    """Base class of oracles that compute observation and masks directly, without a slot table."""

    must_act = False
    """If true, WAIT is legal only in environments that have no other legal op."""

    def observe(self) -> Observation:
        features = np.zeros((self.num_envs, BASE_SIZE + SLOT_SIZE * NUM_SLOTS), dtype=np.float32)
        features[:, _PROGRESS] = self.step_number / self.horizon
        self.show(features)
        blueprint = np.zeros((self.num_envs, NUM_BLUEPRINTS), dtype=np.bool_)
        blueprint[:, list(PARAMS)] = True
        legal = np.zeros((self.num_envs, NUM_OPS, NUM_SLOTS), dtype=np.bool_)
        for op, possible in self.legal().items():
            legal[:, op] = possible
        legal[:, LifecycleOp.WAIT, 0] = ~legal.any(axis=(1, 2)) | (not self.must_act)
        masks = ActionMasks(
            slot_by_op=torch.from_numpy(legal),
            blueprint=torch.from_numpy(blueprint),
            alpha_is_zero=torch.ones(self.num_envs, NUM_SLOTS, dtype=torch.bool),
            stages=torch.full((self.num_envs, NUM_SLOTS), int(Stage.DORMANT)),
        )
        empty = torch.full((self.num_envs, NUM_SLOTS), -1)
        return Observation(torch.from_numpy(features), empty, masks)

    def draw(self, count: int) -> NDArray[np.int64]:
        """Draw one integer below ``count`` per environment, from the random stream of that environment."""
        return np.array([rng.integers(count) for rng in self.rngs])

    def show(self, features: NDArray[np.float32]) -> None:
        """Write the observed columns into ``features [env, column]``; the time column is already filled."""

    @abstractmethod
    def legal(self) -> Legal:
        """Return the legal slots of each op at the present step."""


def slot_column(slot: int, offset: int = 0) -> int:
    """Return the index of a slot's column in an observation; ``offset`` is its position among the slot's
    columns."""
    return BASE_SIZE + SLOT_SIZE * slot + offset


SLOT_COLUMNS = [slot_column(slot) for slot in range(NUM_SLOTS)]


class Bandit(ToyOracle):
    """Oracle with reward 1 at every step for germinating CONV_HEAVY in slot 2, and 0 for other actions."""

    horizon = 4
    optimum = 4.0

    def legal(self) -> Legal:
        return {LifecycleOp.GERMINATE: True}

    def rewards(self, actions: Actions) -> Rewards:
        right = (actions[:, Head.OP] == LifecycleOp.GERMINATE) & (actions[:, Head.SLOT] == 2)
        return (right & (actions[:, Head.BLUEPRINT] == BlueprintAction.CONV_HEAVY)).astype(np.float64)


class Timing(ToyOracle):
    """Oracle with reward 1 for germinating at step 0, waiting three steps and fossilizing.

    Each step by which the waiting time differs from three costs 0.3; each step after step 4 at which the seed
    is not yet fossilized costs 0.05.
    """

    horizon = 8
    optimum = 1.0
    wait = 3

    def start(self) -> None:
        self.age = np.full(self.num_envs, -1)
        self.over = np.zeros(self.num_envs, dtype=np.bool_)

    def show(self, features: NDArray[np.float32]) -> None:
        features[:, slot_column(0)] = self.age >= 0
        features[:, slot_column(0, 1)] = np.maximum(self.age, 0) / self.horizon
        features[:, slot_column(1)] = self.over

    def legal(self) -> Legal:
        age, goes_on = self.age[:, None], ~self.over[:, None]
        grown = (age >= 0) & goes_on
        return {
            LifecycleOp.GERMINATE: (age < 0) & goes_on,
            LifecycleOp.FOSSILIZE: grown,
            LifecycleOp.PRUNE: grown,
        }

    def rewards(self, actions: Actions) -> Rewards:
        op = actions[:, Head.OP]
        done = op == LifecycleOp.FOSSILIZE
        lost = self.step_number - (self.wait + 1)
        pay = 1.0 - 0.3 * np.abs(self.age - self.wait) - 0.05 * max(lost, 0)
        reward = np.where(done, np.maximum(pay, 0.0), 0.0)
        self.age = np.where(op == LifecycleOp.PRUNE, -1, np.where(self.age >= 0, self.age + 1, self.age))
        self.age = np.where(op == LifecycleOp.GERMINATE, 0, self.age)
        self.over |= done
        return reward


class Memory(ToyOracle):
    """Oracle that shows a slot at step 0 and rewards germinating in that slot at step 50, the last step."""

    delay = 50
    horizon = delay + 1
    optimum = 1.0
    must_act = True

    def start(self) -> None:
        self.answer = self.draw(NUM_SLOTS)

    def show(self, features: NDArray[np.float32]) -> None:
        if self.step_number == 0:
            features[:, SLOT_COLUMNS] = self.answer[:, None] == np.arange(NUM_SLOTS)

    def legal(self) -> Legal:
        return {LifecycleOp.GERMINATE: self.step_number == self.delay}

    def rewards(self, actions: Actions) -> Rewards:
        is_last = self.step_number == self.delay
        return ((actions[:, Head.SLOT] == self.answer) & is_last).astype(np.float64)


class Combination(ToyOracle):
    """Oracle with one legal op per step, which is random and not part of the observation.

    If the legal op is GERMINATE, only one slot is legal, and one blueprint that depends on this slot has
    reward 1. If another op is legal, one slot that depends on the op has reward 1.
    """

    horizon = 6
    optimum = 6.0
    must_act = True
    ops = (LifecycleOp.GERMINATE, LifecycleOp.SET_ALPHA_TARGET, LifecycleOp.PRUNE, LifecycleOp.FOSSILIZE)
    slot_of_op = np.array([0, 0, 2, 0, 1, 0])
    blueprint_of_slot = np.array(
        [BlueprintAction.NORM, BlueprintAction.CONV_HEAVY, BlueprintAction.CONV_LIGHT]
    )

    def start(self) -> None:
        self.op = np.array(self.ops)[self.draw(len(self.ops))]
        self.slot = self.draw(NUM_SLOTS)

    def legal(self) -> Legal:
        forced: Legal = {op: (self.op == op)[:, None] for op in self.ops}
        own = self.slot[:, None] == np.arange(NUM_SLOTS)
        return {**forced, LifecycleOp.GERMINATE: forced[LifecycleOp.GERMINATE] & own}

    def rewards(self, actions: Actions) -> Rewards:
        op, slot = actions[:, Head.OP], actions[:, Head.SLOT]
        fits = actions[:, Head.BLUEPRINT] == self.blueprint_of_slot[slot]
        right = np.where(op == LifecycleOp.GERMINATE, fits, slot == self.slot_of_op[op])
        self.start()
        return right.astype(np.float64)


class Rent(ToyOracle):
    """Oracle with reward 1 for each of the first two germinations and −2 for a third."""

    horizon = 6
    optimum = 2.0

    def start(self) -> None:
        self.seeds = np.zeros(self.num_envs, dtype=np.int64)

    def show(self, features: NDArray[np.float32]) -> None:
        features[:, SLOT_COLUMNS] = self.seeds[:, None] > np.arange(NUM_SLOTS)

    def legal(self) -> Legal:
        return {LifecycleOp.GERMINATE: (self.seeds < NUM_SLOTS)[:, None]}

    def rewards(self, actions: Actions) -> Rewards:
        planted = actions[:, Head.OP] == LifecycleOp.GERMINATE
        reward = np.where(planted, np.where(self.seeds < 2, 1.0, -2.0), 0.0)
        self.seeds = self.seeds + planted
        return reward


class Distractors(ToyOracle):
    """Oracle with reward 1 for germinating in the slot that the observation marks, 0 for other actions."""

    horizon = 8
    optimum = 8.0

    def start(self) -> None:
        self.shown = self.draw(NUM_SLOTS)

    def show(self, features: NDArray[np.float32]) -> None:
        features[:, SLOT_COLUMNS] = self.shown[:, None] == np.arange(NUM_SLOTS)

    def legal(self) -> Legal:
        ops = (LifecycleOp.GERMINATE, LifecycleOp.SET_ALPHA_TARGET, LifecycleOp.PRUNE)
        return dict.fromkeys(ops, True)

    def rewards(self, actions: Actions) -> Rewards:
        right = (actions[:, Head.OP] == LifecycleOp.GERMINATE) & (actions[:, Head.SLOT] == self.shown)
        self.start()
        return right.astype(np.float64)
