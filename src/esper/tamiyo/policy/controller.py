"""Controller that takes the argmax actions of a trained policy."""

from collections.abc import Sequence
from operator import itemgetter

import torch
from torch import Tensor

from esper.leyline import ActionSpace, Decisions, EpochFacts, PolicyOutput, SlotTable
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCritic, Hidden, PolicyDecision
from esper.tamiyo.policy.features import Observation, Observer


class PolicyController:
    """Controller that takes the most probable action of a trained policy in every environment.

    Args:
        space: Action space of the hosts.
        num_envs: Number of environments.
        policy: Trained policy.
        shown: Observations of another episode, shown to the policy in place of the present episode; legal
            actions are still those of the present episode. A policy that ignores its observations decides the
            same with ``shown``; a policy that reacts to them gets worse.
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
        """Observations of the present episode, one per step."""

    def decide(self, facts: EpochFacts, table: SlotTable) -> Decisions:
        seen = self._observer.observe(facts, table, self._space)
        self.observations.append(seen)
        if self._shown:
            # If ``shown`` has fewer observations than the episode has steps, the last one is repeated.
            other = self._shown[min(len(self.observations), len(self._shown)) - 1]
            seen = other._replace(masks=seen.masks)
        decision = decide(self._policy, seen, self._hidden)
        self._hidden = decision.hidden
        return Decisions(decision.actions.numpy(), policy_outputs(decision, self._policy.sizes))


def decide(
    policy: FactoredRecurrentActorCritic,
    seen: Observation,
    hidden: Hidden,
    uniforms: Tensor | None = None,
    *,
    at_once: int | None = None,
) -> PolicyDecision:
    """Return the policy's decision for every environment, in one copy from the policy's device to the CPU.

    Args:
        policy: Policy network.
        seen: Observation of all environments.
        hidden: LSTM state before the decision, on any device; the returned state is on the policy's.
        uniforms: Random numbers ``[env, head]`` for sampling; the decision is argmax without them.
        at_once: Environments per forward pass, all unless given; this number can change the last bits of a
            decision.

    Raises:
        EmptyMaskError: A head of an environment has no legal value.
    """
    device = next(policy.parameters()).device
    sent, memory = seen.each(lambda x: x.to(device)), [state.to(device) for state in hidden]
    uniforms = None if uniforms is None else uniforms.to(device)
    count, parts = len(seen.features), []
    for first in range(0, count, at_once or count):
        envs = slice(first, first + (at_once or count))
        own = sent.each(itemgetter(envs))
        with torch.no_grad():
            part = policy.get_action(
                own.features,
                own.blueprint_indices,
                (memory[0][:, envs].clone(), memory[1][:, envs].clone()),
                own.masks,
                uniforms=None if uniforms is None else uniforms[envs],
                deterministic=uniforms is None,
            )
        parts.append(part)
    decision = PolicyDecision.read(parts)
    for head, mask in enumerate(decision.masks.split(list(policy.sizes), dim=-1)):
        seen.masks.check(head, mask)
    return decision


def policy_outputs(decision: PolicyDecision, sizes: Sequence[int]) -> list[PolicyOutput]:
    """Return the policy output of each environment as plain numbers; ``sizes`` are the head widths."""
    masked = torch.stack([~mask.all(dim=-1) for mask in decision.masks.split(list(sizes), dim=-1)], dim=-1)
    columns = (masked, decision.log_probs, decision.op_probs, decision.value)
    return [PolicyOutput(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
