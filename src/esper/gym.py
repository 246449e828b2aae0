"""Gymnasium environment of a growing network, for agents of other libraries.

::

    import esper.gym  # registers the environment
    env = gymnasium.make("esper/Morph-v0", task="digits_impaired")
    MaskablePPO("MlpPolicy", env).learn(10_000)

One episode trains one host from its initial weights to the horizon; one step is one decision and one epoch.
Observations, rewards and setting names of the Gymnasium environment are those of ``esper train``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from numpy.typing import NDArray

from esper.karn.slot_reports import slot_report_table
from esper.leyline import (
    CANONICAL_ACTION,
    HEAD_NAMES,
    HEADS_OF_OP,
    NUM_BLUEPRINTS,
    NUM_OPS,
    OP_GERMINATE,
    Head,
    IntArray,
    InvalidActionError,
    SlotConfig,
    UnknownNameError,
    canonicalise,
    head_sizes,
)
from esper.run.policy_training import task_of
from esper.run.run_config import ConfigError, checked
from esper.simic.config import TrainingConfig
from esper.simic.training.policy_env import GrowthEnv
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.feature_table import BOUND
from esper.tamiyo.policy.features import Observation, get_feature_size
from esper.tolaria.tasks import TaskSpec, register_task
from esper.tolaria.tasks.user_tasks import checked_task

ENV_ID: Final = "esper/Morph-v0"
SETTINGS: Final = (
    *("task", "steps", "budget", "auto_forward", "slots", "vary_slots", "capacity", "context", "hold_heads"),
    *("reward_family", "rent", "reward_scale", "horizon_terminates", "devices", "amp"),
)
"""Settings of ``esper train`` that concern environments; those of the policy and its training are refused."""
Features = NDArray[np.float32]
Mask = NDArray[np.int8]


def joint_actions(num_slots: int) -> IntArray:
    """Return every combination of op, slot and blueprint as an action ``[combination, head]``, ascending.

    Heads that the op does not read have their canonical index, and so have style, tempo and alpha.
    """
    combinations = np.array(list(np.ndindex(NUM_OPS, num_slots, NUM_BLUEPRINTS)))
    actions = np.tile(CANONICAL_ACTION, (len(combinations), 1))
    actions[:, : Head.BLUEPRINT + 1] = combinations
    return np.unique(canonicalise(actions, np.ones(len(actions))), axis=0)


def joint_mask(masks: ActionMasks, actions: IntArray, unfit: Iterable[tuple[int, int]]) -> Mask:
    """Return which of the actions ``[combination, head]`` are legal in the first environment; a blueprint is
    illegal in the slots of the pairs ``unfit`` (slot, blueprint)."""
    op, slot, blueprint = actions[:, : Head.BLUEPRINT + 1].T
    fits = np.tile(masks.blueprint[0].numpy(), (masks.slot_by_op.shape[-1], 1))
    for pair in unfit:
        fits[pair] = False
    legal = masks.slot_by_op[0].numpy()[op, slot] & (fits[slot, blueprint] | (op != OP_GERMINATE))
    return legal.astype(np.int8)


def head_masks(masks: ActionMasks) -> tuple[Mask, ...]:
    """Return which indices of each head are legal in the first environment, for at least one legal action."""
    legal = masks.slot_by_op[0].numpy()
    ops = legal.any(axis=1)
    read: NDArray[np.bool_] = np.asarray(HEADS_OF_OP[ops].any(axis=0))
    read[list(masks.held)] = False
    free = {Head.OP: ops, Head.SLOT: legal.any(axis=0), Head.BLUEPRINT: masks.blueprint[0].numpy()}
    found: list[Mask] = []
    for head, size in zip(Head, head_sizes(legal.shape[1]), strict=True):
        canonical = np.arange(size) == CANONICAL_ACTION[head]
        mask = free.get(head, np.ones(size, dtype=np.bool_)) if read[head] else canonical
        found.append(np.asarray(mask, dtype=np.int8))
    return tuple(found)


class GymMorphEnv(gymnasium.Env[Features, NDArray[np.int64] | np.int64]):
    """Gymnasium environment of one growing host; equal rng seeds give equal episodes.

    An observation is the feature vector of the policy, followed by a one-hot code of the blueprint in each
    slot. An action is eight integer indices, one per head, or the number of a row of ``joint_actions``.

    Args:
        task: Name of a task, a path ``package.module:function``, or a function that returns a task.
        joint: Whether an action is one number that selects op, slot and blueprint together. The masks of such
            actions are exact; style, tempo and alpha ramps are canonical.
        render_mode: ``"ansi"`` if ``render`` is to return a text, otherwise None.
        settings: Settings of ``esper train`` that concern environments, such as ``steps``, ``slots`` and
            ``reward_family``. The heads named in ``hold_heads`` are fixed, whatever the agent chooses.

    Raises:
        ConfigError: A setting has an invalid value, or concerns the policy or its training.
        UnknownNameError: A setting or a render mode is unknown.

    Example:
        >>> env = GymMorphEnv(task="digits_impaired", steps=10)
        >>> observation, info = env.reset(seed=0)
        >>> action = env.action_space.sample(info["action_mask"])
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012  as Gymnasium declares it

    def __init__(
        self,
        task: str | Callable[[], TaskSpec] = "digits_impaired",
        *,
        joint: bool = False,
        render_mode: str | None = None,
        **settings: Any,
    ) -> None:
        _check_names(settings, render_mode)
        if callable(task):
            found = checked_task(task(), getattr(task, "__qualname__", repr(task)))
            register_task(found)
            task = found.name
        self.render_mode = render_mode
        self._config = checked(TrainingConfig, {"task": task, **settings, "envs": 1})
        self._task = task_of(self._config)
        self._held = frozenset(HEAD_NAMES.index(name) for name in self._config.hold_heads)
        slots = self._config.capacity or self._task.num_slots
        self.joint_actions = joint_actions(slots) if joint else None
        """Action ``[head]`` of every number that ``step`` accepts; None if an action is eight indices."""
        self.action_space = (
            spaces.MultiDiscrete(list(head_sizes(slots)))
            if self.joint_actions is None
            else spaces.Discrete(len(self.joint_actions))
        )
        features = get_feature_size(SlotConfig.of_count(slots), self._config.context)
        size = features + slots * NUM_BLUEPRINTS
        self.observation_space = spaces.Box(-BOUND, BOUND, (size,), np.float32)
        self._env: GrowthEnv | None = None
        self._spec: EnvSpec | None = None

    @property
    def spec(self) -> EnvSpec | None:
        """Specification that ``gymnasium.make`` assigns; its ``max_episode_steps`` is the horizon."""
        return self._spec

    @spec.setter
    def spec(self, spec: EnvSpec | None) -> None:
        self._spec = spec and replace(spec, max_episode_steps=self._task.horizon)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Features, dict[str, Any]]:
        """Start the first episode of an rng seed, or the next episode of the current rng seed.

        Args:
            seed: Rng seed of the episodes; unless given, the current one, or a random one at the first call.
            options: Ignored; part of the Gymnasium interface.

        Returns:
            The first observation, and a dictionary with the ``action_mask``.
        """
        super().reset(seed=seed)
        if seed is not None or self._env is None:
            rng_seed = int(self.np_random.integers(2**31)) if seed is None else seed
            self._env = GrowthEnv(self._task, self._config, rng_seed=rng_seed, env_indices=(0,))
        return self._seen(self._env.reset())

    def step(
        self, action: NDArray[np.int64] | np.int64
    ) -> tuple[Features, float, bool, bool, dict[str, Any]]:
        """Execute an action and train for one epoch; an illegal action has no effect, and the epoch is
        trained anyway.

        Args:
            action: Eight integer indices, one per head, or the number of a joint action.

        Returns:
            Observation, reward, terminated, truncated, and a dictionary with the next ``action_mask``.
            After the last step of an episode the dictionary has the ``report`` of the episode.
            The horizon terminates an episode, or truncates it if ``horizon_terminates`` is false.
            A host that diverges terminates its episode.

        Raises:
            InvalidActionError: The action is not in the action space.
        """
        assert self._env is not None, "call reset() first"
        known = len(self._env.reports)
        result = self._env.step(self._heads_of(action)[None])
        ended, terminated = bool(result.ended[0]), bool(result.terminated[0])
        seen, info = self._seen(result.observation)
        if new := self._env.reports[known:]:
            info["report"] = asdict(new[0])
        return seen, float(result.reward[0]), terminated, ended and not terminated, info

    def render(self) -> str | None:
        """Return epoch, score and a table of all slots as text; None unless ``render_mode`` is ``"ansi"``."""
        if self.render_mode is None or self._env is None:
            return None
        facts = self._env.vector.facts
        return (
            f"epoch {facts.epoch[0]} of {facts.max_epochs[0]}: validation score {facts.val_score[0]:.4g},"
            f" {facts.params[0]:,} parameters, {facts.grown_params[0]:,} of them in seeds\n"
            + slot_report_table(self._env.vector.envs[0].reports())
        )

    def action_masks(self) -> NDArray[np.bool_]:
        """Return which actions are legal, as one flat array, in the form that MaskablePPO reads.

        The mask of joint actions is exact: of the allowed actions, a gate can refuse only FOSSILIZE and
        ADVANCE. Without joint actions each head has its own mask: a slot is allowed if any op is legal in it,
        and a head that no legal op reads allows only its canonical index. Because each head is masked
        separately, a combination of allowed indices can be illegal.
        """
        assert self._env is not None, "call reset() first"
        mask = self._mask
        return (np.concatenate(mask) if isinstance(mask, tuple) else mask).astype(np.bool_)

    def _seen(self, observation: Observation) -> tuple[Features, dict[str, Any]]:
        """Store the masks of an observation; return the observation as one array, and its ``info``."""
        assert self._env is not None
        self._masks = observation.masks.holding(self._held)
        if self.joint_actions is None:
            self._mask: Mask | tuple[Mask, ...] = head_masks(self._masks)
        else:
            unfit = self._env.vector.action_space.unfit
            self._mask = joint_mask(self._masks, self.joint_actions, unfit)
        planted = observation.blueprint_indices[0].numpy()[:, None] == np.arange(NUM_BLUEPRINTS)
        seen = np.concatenate([observation.features[0].numpy(), planted.ravel()], dtype=np.float32)
        return seen, {"action_mask": self._mask}

    def _heads_of(self, action: NDArray[np.int64] | np.int64) -> IntArray:
        """Return an action of the action space as ``[head]``, with held heads at their only legal index."""
        if not self.action_space.contains(action):
            raise InvalidActionError(
                f"action {action} is not in {self.action_space}; choose one as action_space.sample() does"
            )
        heads = np.array(action if self.joint_actions is None else self.joint_actions[action], np.int64)
        for head in self._held:
            is_blueprint = head == Head.BLUEPRINT
            heads[head] = self._masks.blueprint[0].int().argmax() if is_blueprint else CANONICAL_ACTION[head]
        return heads


def _check_names(settings: Iterable[str], render_mode: str | None) -> None:
    """Raise an error for settings that are unknown or of the policy training, and for an unknown render
    mode."""
    unread = [name for name in settings if name not in SETTINGS]
    training = [name for name in unread if name in TrainingConfig.model_fields]
    if training:
        raise ConfigError(
            f"found settings of the training of a policy: {', '.join(training)}; leave them out, since an"
            f" agent has its own, and reset takes the rng seed. Allowed: {', '.join(SETTINGS)}"
        )
    for name in unread:
        raise UnknownNameError("setting", name, SETTINGS)
    if render_mode not in (None, "ansi"):
        raise UnknownNameError("render mode", str(render_mode), ["ansi"])


gymnasium.register(ENV_ID, entry_point=GymMorphEnv)
gymnasium.register("esper/GrowBench-v0", entry_point="esper.growbench.replay_env:GrowBenchEnv")
