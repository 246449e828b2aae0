"""A trained policy as a controller: argmax, one recurrent state per environment."""

from collections.abc import Sequence

import torch
from torch import Tensor

from esper.leyline import ActionSpace, EpochFacts, SlotTable
from esper.leyline.protocols import Decisions, PolicyOutput
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCritic, Hidden, PolicyDecision
from esper.tamiyo.policy.observer import Observation, Observer


class PolicyController:
    """Follows a trained policy."""

    name = "ppo"

    def __init__(
        self,
        space: ActionSpace,
        num_envs: int,
        policy: FactoredRecurrentActorCritic,
        *,
        shown: Sequence[Observation] = (),
    ) -> None:
        """``shown``, if any, is what the policy sees in place of its own episode, whose legal actions it has.

        A policy with a plan of its own decides alike whatever it is shown; one that reacts gets worse.
        """
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
        """Of this episode, step by step."""

    def decide(self, facts: EpochFacts, table: SlotTable) -> Decisions:
        seen = self._observer.observe(facts, table, self._space)
        self.observations.append(seen)
        if self._shown:
            other = self._shown[min(len(self.observations), len(self._shown)) - 1]  # it may have ended early
            seen = other._replace(masks=seen.masks)
        decision = decide(self._policy, seen, self._hidden)
        self._hidden = decision.hidden
        return Decisions(decision.actions.numpy(), policy_outputs(decision, self._policy.sizes))


def decide(
    policy: FactoredRecurrentActorCritic, seen: Observation, hidden: Hidden, uniforms: Tensor | None = None
) -> PolicyDecision:
    """What the policy does about ``seen``: sampled by ``uniforms [env, 8]``, or argmax without them.

    Everything goes to the policy's device and comes back to the processor.
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
    """A decision in plain numbers, one environment after the other; ``sizes`` are the heads' in its masks."""
    masked = torch.stack([~mask.all(dim=-1) for mask in decision.masks.split(list(sizes), dim=-1)], dim=-1)
    columns = (masked, decision.log_probs, decision.op_probs, decision.value)
    return [PolicyOutput(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
