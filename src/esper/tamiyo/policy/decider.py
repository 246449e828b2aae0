"""A trained policy as a decision maker: argmax, one recurrent state per environment."""

from __future__ import annotations

import torch

from esper.leyline import ActionSpace, EpochFacts, SlotTable
from esper.leyline.errors import EsperError
from esper.leyline.factored_actions import IntArray
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCritic
from esper.tamiyo.policy.action_masks import compute_batch_masks
from esper.tamiyo.policy.features import batch_obs_to_features
from esper.tamiyo.tracker import SignalTracker


class CapacityError(EsperError):
    """A model with another number of slots than the policy was trained for."""


class PolicyController:
    """Follows a trained policy."""

    name = "ppo"

    def __init__(self, space: ActionSpace, num_envs: int, policy: FactoredRecurrentActorCritic) -> None:
        slots = space.slot_config.num_slots
        if slots != policy.num_slots:
            raise CapacityError(
                f"this policy was trained for {policy.num_slots} slots, the model has {slots};"
                " train one for this number of slots"
            )
        self._space = space
        self._policy = policy.eval()
        self._tracker = SignalTracker(num_envs)
        self._num_envs = num_envs
        self.reset(0)

    def reset(self, episode: int) -> None:
        self._tracker.reset()
        self._hidden = self._policy.get_initial_hidden(self._num_envs)

    def decide(self, facts: EpochFacts, table: SlotTable) -> IntArray:
        signals = self._tracker.update(facts)
        features, blueprints = batch_obs_to_features(signals, table, self._space.slot_config)
        masks = compute_batch_masks(table, self._space)
        with torch.no_grad():
            decision = self._policy.get_action(features, blueprints, self._hidden, masks, deterministic=True)
        self._hidden = decision.hidden
        return decision.actions.numpy()
