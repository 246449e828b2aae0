"""Functions that return small policies, slot tables, and rollouts without an environment."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper.leyline import NUM_HEADS, SlotConfig, SlotTable, Stage
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCritic, Hidden
from esper.tamiyo.policy.action_masks import compute_batch_masks
from esper.tamiyo.policy.features import get_feature_size
from tests.leyline.building import put, random_table, space_of


def busy_table(num_envs: int = 1) -> SlotTable:
    """Return a slot table: slots 0 and 3 are empty, slot 1 is in HOLDING, slot 2 in TRAINING."""
    table = SlotTable.empty(num_envs, 4)
    for env in range(num_envs):
        put(table, 1, Stage.HOLDING, env, age=9, alpha=1.0, contribution=1.0, contribution_error=0.1)
        put(table, 2, Stage.TRAINING, env, age=4)
    return table


def policy_of(num_slots: int = 3, rng_seed: int = 0, **options: Any) -> FactoredRecurrentActorCritic:
    """Return a small policy with noise added to the weights of its heads, so that its choices vary."""
    torch.manual_seed(rng_seed)
    size = get_feature_size(SlotConfig.of_count(num_slots), options.get("context", False))
    policy = FactoredRecurrentActorCritic(size, num_slots, **{"feature_dim": 32, "hidden_dim": 32, **options})
    with torch.no_grad():
        for parameter in policy.heads.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return policy


class Played(NamedTuple):
    """Decisions of a rollout, every tensor ``[env, step, …]``."""

    state: Tensor
    blueprint_indices: Tensor
    actions: Tensor
    masks: Tensor
    hidden: Hidden
    fresh: Tensor
    log_probs: Tensor
    values: Tensor

    @property
    def sequences(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Hidden, Tensor]:
        """Arguments of ``evaluate_actions`` for the recorded decisions."""
        return self[:6]


def play(policy: FactoredRecurrentActorCritic, fresh: Tensor, rng_seed: int = 0) -> Played:
    """Return a policy's decisions on random slot tables; ``fresh [env, step]`` is true at episode starts."""
    rng = np.random.default_rng(rng_seed)
    torch.manual_seed(rng_seed)
    num_envs, num_steps = fresh.shape
    state = torch.randn(num_envs, num_steps, policy.shape.state_dim)
    start = (
        0.5 * torch.randn(1, num_envs, policy.shape.hidden_dim),
        0.5 * torch.randn(1, num_envs, policy.shape.hidden_dim),
    )
    hidden, decisions, blueprints = start, [], []
    for step in range(num_steps):
        table = random_table(rng, num_envs, policy.num_slots)
        indices = torch.from_numpy(table.blueprint)
        keep = (~fresh[:, step]).float().view(1, -1, 1)
        with torch.no_grad():
            decision = policy.get_action(
                state[:, step],
                indices,
                (hidden[0] * keep, hidden[1] * keep),
                compute_batch_masks(table, space_of(policy.num_slots, auto_forward=False)),
                uniforms=torch.rand(num_envs, NUM_HEADS),
            )
        hidden = decision.hidden
        decisions.append(decision)
        blueprints.append(indices)
    return Played(
        state,
        torch.stack(blueprints, dim=1),
        torch.stack([d.actions for d in decisions], dim=1),
        torch.stack([d.masks for d in decisions], dim=1),
        start,
        fresh,
        torch.stack([d.log_probs for d in decisions], dim=1),
        torch.stack([d.value for d in decisions], dim=1),
    )
