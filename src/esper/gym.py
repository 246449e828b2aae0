"""Gymnasium environment of a growing network, for agents of other libraries.

::

    import esper.gym  # registers the environment
    env = gymnasium.make("esper/Morph-v0", task="digits_impaired")
    MaskablePPO("MlpPolicy", env).learn(10_000)

One episode trains one host from its initial weights to its horizon; one step is one decision and one epoch.
Observations, rewards and names of settings are those of ``esper train``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from esper.leyline import CANONICAL_ACTION, HEADS_OF_OP, NUM_BLUEPRINTS, Head, SlotConfig, head_sizes
from esper.run.policy_training import task_of
from esper.run.run_config import checked
from esper.simic.config import TrainingConfig
from esper.simic.training.policy_env import GrowthEnv
from esper.tamiyo.policy.feature_table import BOUND
from esper.tamiyo.policy.features import get_feature_size
from esper.tamiyo.policy.observer import Observation
from esper.tolaria.tasks import TaskSpec, register_task
from esper.tolaria.tasks.user_tasks import checked_task

ENV_ID: Final = "esper/Morph-v0"
Features = NDArray[np.float32]


class GymMorphEnv(gymnasium.Env[Features, NDArray[np.int64]]):
    """Environment of one growing host; equal rng seeds give equal episodes.

    An observation holds the features of the policy, followed by a one-hot code of the blueprint in each slot.
    An action is eight indices, one per head.

    Args:
        task: Name of a task, ``package.module:function``, or a function that returns a task.
        settings: Settings of ``esper train`` that concern environments, such as ``steps``, ``slots`` and
            ``reward_family``.

    Raises:
        ConfigError: A setting is unknown or invalid.

    Example:
        >>> env = GymMorphEnv(task="digits_impaired", steps=10)
        >>> observation, info = env.reset(seed=0)
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  as Gymnasium declares it

    def __init__(self, task: str | Callable[[], TaskSpec] = "digits_impaired", **settings: Any) -> None:
        if callable(task):
            found = checked_task(task(), getattr(task, "__qualname__", repr(task)))
            register_task(found)
            task = found.name
        self._config = checked(TrainingConfig, {"task": task, **settings})
        self._task = task_of(self._config)
        slots = self._config.capacity or self._task.num_slots
        self._sizes = head_sizes(slots)
        features = get_feature_size(SlotConfig.of_count(slots), self._config.context)
        self.action_space = spaces.MultiDiscrete(list(self._sizes))
        size = features + slots * NUM_BLUEPRINTS
        self.observation_space = spaces.Box(-BOUND, BOUND, (size,), np.float32)
        self._env: GrowthEnv | None = None
        self._masks = np.zeros(0, dtype=np.bool_)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Features, dict[str, Any]]:
        """Start the first episode of an rng seed, or the next episode of the current rng seed.

        Args:
            seed: Rng seed; the current one unless given, or a random one at the first call.
            options: Ignored.

        Returns:
            The observation and an empty dictionary.
        """
        super().reset(seed=seed)
        if seed is not None or self._env is None:
            rng_seed = int(self.np_random.integers(2**31)) if seed is None else seed
            self._env = GrowthEnv(self._task, self._config, rng_seed=rng_seed, env_indices=(0,))
        return self._seen(self._env.reset()), {}

    def step(self, action: NDArray[np.int64]) -> tuple[Features, float, bool, bool, dict[str, Any]]:
        """Execute an action and train for one epoch; an illegal action changes nothing before the epoch.

        Args:
            action: Eight indices, one per head.

        Returns:
            Observation, reward, terminated, truncated, and a dictionary with the ``report`` of the episode
            after its last step. The horizon terminates an episode, or truncates it if ``horizon_terminates``
            is false; a host that diverges terminates it.
        """
        assert self._env is not None, "call reset() first"
        known = len(self._env.reports)
        result = self._env.step(np.asarray(action, dtype=np.int64)[None])
        ended, terminated = bool(result.ended[0]), bool(result.terminated[0])
        new = self._env.reports[known:]
        info = {"report": asdict(new[0])} if new else {}
        seen, truncated = self._seen(result.observation), ended and not terminated
        return seen, float(result.reward[0]), terminated, truncated, info

    def action_masks(self) -> NDArray[np.bool_]:
        """Return the legal indices of all heads ``[sum of head sizes]``, in the form that MaskablePPO reads.

        Each head has its own mask: a slot is allowed if any op is legal in it, and a head that no legal op
        reads allows only its canonical index. A combination of allowed indices can therefore be illegal.
        """
        return self._masks

    def _seen(self, observation: Observation) -> Features:
        """Store the masks of an observation and return it as one array."""
        legal = observation.masks.slot_by_op[0].numpy()
        ops = legal.any(axis=1)
        read: NDArray[np.bool_] = np.asarray(HEADS_OF_OP[ops].any(axis=0))
        read[list(observation.masks.held)] = False
        blueprints = observation.masks.blueprint[0].numpy()
        free = {Head.OP: ops, Head.SLOT: legal.any(axis=0), Head.BLUEPRINT: blueprints}
        masks = []
        for head, size in zip(Head, self._sizes, strict=True):
            canonical = np.arange(size) == CANONICAL_ACTION[head]
            masks.append(free.get(head, np.ones(size, dtype=np.bool_)) if read[head] else canonical)
        self._masks = np.concatenate(masks)
        held = observation.blueprint_indices[0].numpy()[:, None] == np.arange(NUM_BLUEPRINTS)
        return np.concatenate([observation.features[0].numpy(), held.ravel()], dtype=np.float32)


gymnasium.register(ENV_ID, entry_point=GymMorphEnv)
