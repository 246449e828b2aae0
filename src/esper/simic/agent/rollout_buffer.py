"""Rollout buffer: preallocated tensors ``[env, step, …]``, written one step at a time."""

import copy
from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor

from esper.leyline import NUM_HEADS, head_sizes
from esper.tamiyo.networks.factored_lstm import Hidden, PolicyDecision

Sequences = tuple[Tensor, Tensor, Tensor, Tensor, Hidden, Tensor]
"""All steps of some environments of a rollout: the arguments of ``evaluate_actions``, in their order."""


class TamiyoRolloutBuffer:
    """Rollout of a policy: tensors ``[env, step, …]``, and the LSTM state ``hidden`` before the first step.

    Args:
        num_envs: Number of environments.
        num_steps: Capacity of the buffer in steps; ``add`` to a full buffer raises ``RuntimeError``.
        state_dim: Length of an observation.
        num_slots: Number of slots in an observation of the policy.
        hidden_dim: Width of the LSTM.
    """

    def __init__(
        self, num_envs: int, num_steps: int, state_dim: int, num_slots: int, hidden_dim: int
    ) -> None:
        def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(num_envs, num_steps, *shape, dtype=dtype)

        self.num_steps = num_steps
        self.state = rows(state_dim)
        self.blueprint_indices = rows(num_slots, dtype=torch.int64)
        self.actions = rows(NUM_HEADS, dtype=torch.int64)
        self.log_probs = rows(NUM_HEADS)
        self.masks = rows(sum(head_sizes(num_slots)), dtype=torch.bool)
        self.values = rows()
        self.next_values = rows()
        self.rewards = rows()
        self.ended = rows(dtype=torch.bool)
        self.terminated = rows(dtype=torch.bool)
        self.fresh = rows(dtype=torch.bool)
        self.hidden: Hidden = (torch.zeros(1, num_envs, hidden_dim), torch.zeros(1, num_envs, hidden_dim))
        self.length = 0

    def add(self, state: Tensor, blueprint_indices: Tensor, decision: PolicyDecision, fresh: Tensor) -> None:
        """Store observation and decision of one step, for all environments."""
        if self.length == self.num_steps:
            raise RuntimeError(f"the rollout buffer holds {self.num_steps} steps and is full")
        step = self.length
        self.state[:, step] = state
        self.blueprint_indices[:, step] = blueprint_indices
        self.actions[:, step] = decision.actions
        self.log_probs[:, step] = decision.log_probs
        self.masks[:, step] = decision.masks
        self.values[:, step] = decision.value
        self.fresh[:, step] = fresh
        self.length += 1

    def add_outcome(self, reward: Tensor, ended: Tensor, terminated: Tensor) -> None:
        """Store the reward of the last stored decision, and whether the episode ended with that decision."""
        step = self.length - 1
        self.rewards[:, step] = reward
        self.ended[:, step] = ended
        self.terminated[:, step] = terminated

    def add_next_value(self, value: Tensor) -> None:
        """Store the value of the state after the last decision; unused by GAE if the episode terminated."""
        self.next_values[:, self.length - 1] = value

    def get_batched_sequences(self, envs: slice = slice(None)) -> Sequences:
        """Return all steps of the environments ``envs``, with the LSTM state before their first step."""
        hidden = (self.hidden[0][:, envs], self.hidden[1][:, envs])
        state, blueprints = self.state[envs], self.blueprint_indices[envs]
        return state, blueprints, self.actions[envs], self.masks[envs], hidden, self.fresh[envs]

    def to(self, device: torch.device) -> Self:
        """Return a copy of the rollout on ``device``."""
        return self._combined([self], lambda tensors, _: tensors[0].to(device))

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Concatenate rollouts along the environment axis."""
        return cls._combined(parts, torch.cat)

    @classmethod
    def _combined(cls, parts: Sequence[Self], combine: Callable[[list[Tensor], int], Tensor]) -> Self:
        """Return a rollout with ``combine(tensors, environment axis)`` of each tensor of ``parts``."""
        result = copy.copy(parts[0])
        for name, value in vars(parts[0]).items():
            if isinstance(value, Tensor):
                setattr(result, name, combine([getattr(part, name) for part in parts], 0))
        h, c = (combine(list(states), 1) for states in zip(*(part.hidden for part in parts), strict=True))
        result.hidden = (h, c)
        return result
