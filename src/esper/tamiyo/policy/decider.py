"""A trained policy as a decision maker: argmax, one recurrent state per environment."""

from __future__ import annotations

import torch

from esper.leyline import ActionSpace, EpochFacts, SlotTable
from esper.leyline.factored_actions import IntArray
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

    def decide(self, facts: EpochFacts, table: SlotTable) -> IntArray:
        seen = self._observer.observe(facts, table, self._space)
        with torch.no_grad():
            decision = self._policy.get_action(
                seen.features, seen.blueprint_indices, self._hidden, seen.masks, deterministic=True
            )
        self._hidden = decision.hidden
        return decision.actions.numpy()
