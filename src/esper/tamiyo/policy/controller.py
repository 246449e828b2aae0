"""A trained policy as a controller: argmax, one recurrent state per environment."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from esper.leyline import ActionSpace, EpochFacts, SlotTable
from esper.leyline.protocols import Decisions, PolicyOutput
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCritic
from esper.tamiyo.policy.observer import Observer


class PolicyController:
    """Follows a trained policy."""

    name = "ppo"

    def __init__(self, space: ActionSpace, num_envs: int, policy: FactoredRecurrentActorCritic) -> None:
        self._space = space
        self._policy = policy.eval()
        self._observer = Observer(num_envs, space.slot_config.num_slots, policy.num_slots)
        self._num_envs = num_envs
        self.reset(0)

    def reset(self, episode: int) -> None:
        self._observer.reset()
        self._hidden = self._policy.get_initial_hidden(self._num_envs)

    def decide(self, facts: EpochFacts, table: SlotTable) -> Decisions:
        seen = self._observer.observe(facts, table, self._space)
        with torch.no_grad():
            decision = self._policy.get_action(
                seen.features, seen.blueprint_indices, self._hidden, seen.masks, deterministic=True
            )
        self._hidden = decision.hidden
        outputs = policy_outputs(
            decision.masks, decision.log_probs, decision.op_probs, decision.value, self._policy.sizes
        )
        return Decisions(decision.actions.numpy(), outputs)


def policy_outputs(
    masks: Tensor, log_probs: Tensor, op_probs: Tensor, values: Tensor, sizes: Sequence[int]
) -> list[PolicyOutput]:
    """Rows of tensors ``[row, …]`` in plain numbers; ``sizes`` are the heads' within a row of ``masks``."""
    masked = torch.stack([~mask.all(dim=-1) for mask in masks.split(list(sizes), dim=-1)], dim=-1)
    columns = (masked.tolist(), log_probs.tolist(), op_probs.tolist(), values.tolist())
    return [PolicyOutput(*row) for row in zip(*columns, strict=True)]
