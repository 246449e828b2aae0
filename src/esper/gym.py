"""Growing networks as a Gymnasium environment, for the agents of others.

::

    import esper.gym  # registers it
    env = gymnasium.make("esper/Morph-v0", task="digits_impaired")
    MaskablePPO("MlpPolicy", env).learn(10_000)

One episode grows one host from its first weights to its horizon; one step is a decision and an epoch.
Observations, rewards and the names of settings are those of ``esper train``.
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


class MorphEnv(gymnasium.Env[Features, NDArray[np.int64]]):
    """One host that grows; the same rng seed gives the same episodes.

    An observation is the policy's features, then for each slot which blueprint it holds. An action is eight
    indices, one per head.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  as Gymnasium declares it

    def __init__(self, task: str | Callable[[], TaskSpec] = "digits_impaired", **settings: Any) -> None:
        """Build the spaces.

        Args:
            task: Name of a task, ``package.module:function``, or a function that returns a task.
            **settings: Settings of ``esper train`` that concern environments, such as ``steps`` and
                ``slots``.
        """
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
        """The first episode of an rng seed, or the next one of the present seed."""
        super().reset(seed=seed)
        if seed is not None or self._env is None:
            rng_seed = int(self.np_random.integers(2**31)) if seed is None else seed
            self._env = GrowthEnv(self._task, self._config, rng_seed=rng_seed, env_indices=(0,))
        return self._seen(self._env.reset()), {}

    def step(self, action: NDArray[np.int64]) -> tuple[Features, float, bool, bool, dict[str, Any]]:
        """Carry out a decision and train for an epoch; what is not legal is refused and changes nothing.

        A host that breaks down terminates its episode. The end of one has its report in ``info``.
        """
        assert self._env is not None, "call reset() first"
        known = len(self._env.reports)
        result = self._env.step(np.asarray(action, dtype=np.int64)[None])
        ended, terminated = bool(result.ended[0]), bool(result.terminated[0])
        new = self._env.reports[known:]
        info = {"report": asdict(new[0])} if new else {}
        return (
            self._seen(result.observation),
            float(result.reward[0]),
            terminated,
            ended and not terminated,
            info,
        )

    def action_masks(self) -> NDArray[np.bool_]:
        """What may be chosen, head after head ``[sum of sizes]``, as MaskablePPO asks for it.

        By itself: a slot is open if any op is legal there, a head if any legal op reads it.
        """
        return self._masks

    def _seen(self, observation: Observation) -> Features:
        legal = observation.masks.slot_by_op[0].numpy()
        ops = legal.any(axis=1)
        read: NDArray[np.bool_] = np.asarray(HEADS_OF_OP[ops].any(axis=0))
        read[list(observation.masks.held)] = False
        masks = []
        for head, size in enumerate(self._sizes):
            canonical = np.arange(size) == CANONICAL_ACTION[head]
            free = {
                Head.OP: ops,
                Head.SLOT: legal.any(axis=0),
                Head.BLUEPRINT: observation.masks.blueprint[0].numpy(),
            }.get(Head(head), np.ones(size, dtype=np.bool_))
            masks.append(free if read[head] else canonical)
        self._masks = np.concatenate(masks)
        held = observation.blueprint_indices[0].numpy()[:, None] == np.arange(NUM_BLUEPRINTS)
        return np.concatenate([observation.features[0].numpy(), held.ravel()], dtype=np.float32)


gymnasium.register(ENV_ID, entry_point=MorphEnv)
