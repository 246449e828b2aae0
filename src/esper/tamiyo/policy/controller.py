"""Controller that takes the argmax actions of a trained policy."""

from collections.abc import Sequence

import torch
from torch import Tensor

from esper.leyline import ActionSpace, Decisions, EpochFacts, PolicyOutput, SlotTable
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCritic, Hidden, PolicyDecision
from esper.tamiyo.policy.observer import Observation, Observer


class PolicyController:
    """Takes the most probable action of a trained policy, with one LSTM state per environment.

    Args:
        space: Action space of the hosts.
        num_envs: Number of environments.
        policy: Trained policy.
        shown: Observations of another episode, shown to the policy in place of the present episode; legal
            actions are still those of the present episode. An open-loop policy decides the same, a policy
            that reacts to observations gets worse.
    """

    name = "ppo"

    def __init__(
        self,
        space: ActionSpace,
        num_envs: int,
        policy: FactoredRecurrentActorCritic,
        *,
        shown: Sequence[Observation] = (),
    ) -> None:
        self._space = space
        self._shown = shown
        self._policy = policy.eval()
        slots = space.slot_config.num_slots
        self._observer = Observer(num_envs, slots, policy.num_slots, context=policy.shape.context)
        self._num_envs = num_envs
        self.reset(0)

    def reset(self, episode: int) -> None:
        self._observer.reset()
        self._hidden = self._policy.get_initial_hidden(self._num_envs)
        self.observations: list[Observation] = []
        """Observations of the present episode by step."""

    def decide(self, facts: EpochFacts, table: SlotTable) -> Decisions:
        seen = self._observer.observe(facts, table, self._space)
        self.observations.append(seen)
        if self._shown:
            # The last observation of a shorter shown episode is repeated.
            other = self._shown[min(len(self.observations), len(self._shown)) - 1]
            seen = other._replace(masks=seen.masks)
        decision = decide(self._policy, seen, self._hidden)
        self._hidden = decision.hidden
        return Decisions(decision.actions.numpy(), policy_outputs(decision, self._policy.sizes))


def decide(
    policy: FactoredRecurrentActorCritic, seen: Observation, hidden: Hidden, uniforms: Tensor | None = None
) -> PolicyDecision:
    """Return the decision of the policy, sampled with ``uniforms [env, 8]``, argmax without ``uniforms``.

    Inputs are copied to the device of the policy, the decision to the CPU.
    """
    device = next(policy.parameters()).device
    seen, memory = seen.to(device), (hidden[0].to(device), hidden[1].to(device))
    with torch.no_grad():
        decision = policy.get_action(
            *seen[:2],
            memory,
            seen.masks,
            uniforms=None if uniforms is None else uniforms.to(device),
            deterministic=uniforms is None,
        )
    return decision.cpu()


def policy_outputs(decision: PolicyDecision, sizes: Sequence[int]) -> list[PolicyOutput]:
    """Convert a decision to plain numbers, one item per environment; ``sizes`` are the sizes of the heads."""
    masked = torch.stack([~mask.all(dim=-1) for mask in decision.masks.split(list(sizes), dim=-1)], dim=-1)
    columns = (masked, decision.log_probs, decision.op_probs, decision.value)
    return [PolicyOutput(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
