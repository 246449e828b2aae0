"""Recurrent actor-critic with eight factored heads, in float32 and not compiled (ADR 0023).

The policy is an autoregressive product of categorical distributions: the op is sampled first, then the slot,
then the other heads. With the setting ``conditioned``, heads get the sampled op and slot as one-hot inputs.
The log-probabilities of a decision are those of the sampled values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn

from esper.leyline import (
    BLUEPRINT_NULL_INDEX,
    DEFAULT_BLUEPRINT_EMBED_DIM,
    DEFAULT_FEATURE_DIM,
    DEFAULT_LSTM_HIDDEN_DIM,
    HEAD_NAMES,
    NUM_HEADS,
    NUM_OPS,
    AlphaTarget,
    Head,
    LifecycleOp,
    head_sizes,
)
from esper.tamiyo.networks.layers import make_lstm, make_mlp, orthogonal
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.distributions import MASKED_LOG_PROB, MaskedCategorical, mask_logits

Critic = Literal["state_value", "op_value"]
Hidden = tuple[Tensor, Tensor]
"""LSTM state (h, c), two tensors ``[layer, batch, hidden]`` with one layer."""

HEAD_HIDDEN: Final = 128
INITIAL_LOGITS: Final[Mapping[Head, Mapping[int, float]]] = {
    Head.OP: {LifecycleOp.WAIT: 1.0, LifecycleOp.PRUNE: -2.0},
    Head.ALPHA_TARGET: {AlphaTarget.FULL: 1.0},
}
"""Initial biases of the heads' last layers, by head and by value of the head; all other biases start at 0.

If initial choices were uniform, two thirds of the seeds would have an alpha target below 1 and never reach
HOLDING, and most seeds would be pruned.
"""


class BlueprintEmbedding(nn.Module):
    """Embedding of the blueprint in each slot, with one more vector for empty slots."""

    null_index: Tensor

    def __init__(self, dim: int = DEFAULT_BLUEPRINT_EMBED_DIM) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BLUEPRINT_NULL_INDEX + 1, dim)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.register_buffer("null_index", torch.tensor(BLUEPRINT_NULL_INDEX))

    def forward(self, indices: Tensor) -> Tensor:
        """Map blueprint indices ``[..., slot]``, -1 for empty slots, to vectors ``[..., slot, dim]``."""
        return self.embedding(torch.where(indices < 0, self.null_index, indices))


class PolicyDecision(NamedTuple):
    """One sampled (or argmax) decision per environment."""

    actions: Tensor
    """Chosen value of every head, ``[env, head]``."""
    log_probs: Tensor
    """Log-probabilities ``[env, head]`` of the chosen values, 0 where a head had one legal value."""
    masks: Tensor
    """Legal values of all heads, concatenated: bool ``[env, sum of head sizes]``."""
    op_probs: Tensor
    """Probabilities ``[env, op]`` of the ops, 0 for masked ops."""
    value: Tensor
    """Values of the critic ``[env]``."""
    hidden: Hidden

    @classmethod
    def read(cls, parts: Sequence[PolicyDecision]) -> PolicyDecision:
        """Join decisions along the environment axis and copy them to the CPU in one copy.

        The LSTM state stays on its device.
        """
        flat = [
            torch.cat([column.float() for column in (*p[:4], p.value.unsqueeze(1))], dim=1) for p in parts
        ]
        widths = [NUM_HEADS, NUM_HEADS, parts[0].masks.shape[1], NUM_OPS, 1]
        actions, log_probs, masks, op_probs, value = torch.cat(flat).cpu().split(widths, dim=1)
        h, c = (torch.cat(states, dim=1) for states in zip(*(p.hidden for p in parts), strict=True))
        return cls(actions.long(), log_probs, masks.bool(), op_probs, value.squeeze(1), (h, c))


class ActionEvaluation(NamedTuple):
    """Log-probabilities, entropies and values of stored decisions ``[env, step]`` for the present weights."""

    log_probs: Tensor
    entropies: Tensor
    """Entropies ``[env, step, head]``, divided by the log of the number of legal values."""
    has_choice: Tensor
    value: Tensor


@dataclass(frozen=True, slots=True)
class PolicyShape:
    """Arguments of the policy network that determine the shapes of all parameters."""

    state_dim: int
    num_slots: int
    feature_dim: int = DEFAULT_FEATURE_DIM
    hidden_dim: int = DEFAULT_LSTM_HIDDEN_DIM
    critic: Critic = "state_value"
    conditioned: bool = True
    recurrent: bool = True
    hold_heads: tuple[str, ...] = ()
    """Names of heads that are fixed at one value, as ``ActionMasks.holding`` describes."""
    context: bool = False
    """Whether ``state_dim`` includes the context features."""


class FactoredRecurrentActorCritic(nn.Module):
    """Policy network: observation and blueprint embeddings → LSTM → eight heads and a value.

    Args:
        state_dim: Length of an observation, see ``get_feature_size``.
        num_slots: Number of slots in an observation, the capacity of the policy.
        others: Values for the other fields of ``PolicyShape``.
    """

    def __init__(self, state_dim: int, num_slots: int, **others: Any) -> None:
        super().__init__()
        self.shape = shape = PolicyShape(state_dim, num_slots, **others)
        feature_dim, hidden_dim = shape.feature_dim, shape.hidden_dim
        self._held = frozenset(HEAD_NAMES.index(name) for name in shape.hold_heads)
        self.num_slots = num_slots
        self.sizes = head_sizes(num_slots)
        self.blueprints = BlueprintEmbedding()
        inputs = state_dim + num_slots * DEFAULT_BLUEPRINT_EMBED_DIM
        self.features = nn.Sequential(
            orthogonal(nn.Linear(inputs, feature_dim), math.sqrt(2)), nn.LayerNorm(feature_dim), nn.ReLU()
        )
        self.lstm = make_lstm(feature_dim, hidden_dim)
        self.norm = nn.LayerNorm(hidden_dim)
        self.heads = nn.ModuleDict(
            {name: self._make_head(Head(index)) for index, name in enumerate(HEAD_NAMES)}
        )
        value_inputs = hidden_dim + (NUM_OPS if shape.critic == "op_value" else 0)
        self.value_head = make_mlp(value_inputs, (HEAD_HIDDEN,), 1, 1.0)

    def _make_head(self, head: Head) -> nn.Sequential:
        hidden = (self.shape.hidden_dim, HEAD_HIDDEN) if head is Head.BLUEPRINT else (HEAD_HIDDEN,)
        made = make_mlp(self.shape.hidden_dim + sum(self._context(head)), hidden, self.sizes[head], 0.01)
        last = made[-1]
        assert isinstance(last, nn.Linear)
        with torch.no_grad():
            for value, logit in INITIAL_LOGITS.get(head, {}).items():
                last.bias[value] = logit
        return made

    def _context(self, head: Head) -> tuple[int, ...]:
        """Return the widths of the one-hot inputs (op, slot) of a head; empty without conditioning."""
        return (NUM_OPS, self.num_slots)[:head] if self.shape.conditioned else ()

    def get_initial_hidden(self, batch: int, device: torch.device | str | None = None) -> Hidden:
        """Return the LSTM state at the start of an episode, zeros ``[layer, batch, hidden]``.

        Args:
            batch: Number of environments.
            device: Device of the zeros; the device of the network if not given.
        """
        device = self.blueprints.null_index.device if device is None else device
        zeros = torch.zeros(1, batch, self.shape.hidden_dim, device=device)
        return zeros, zeros.clone()

    @property
    def max_entropies(self) -> dict[str, float]:
        """Largest entropy that each head can have, by name of the head: log(number of values), but at least
        1."""
        sizes = zip(HEAD_NAMES, self.sizes, strict=True)
        return {name: max(math.log(size), 1.0) for name, size in sizes}

    # --- embedding and LSTM ---------------------------------------------------------------------------

    def encode(
        self, state: Tensor, blueprint_indices: Tensor, hidden: Hidden, fresh: Tensor | None = None
    ) -> tuple[Tensor, Hidden]:
        """Run embedding and LSTM over sequences, with the LSTM state reset where an episode begins.

        Args:
            state: Observations ``[batch, seq, state_dim]``.
            blueprint_indices: Blueprint of every slot ``[batch, seq, slot]``, -1 for empty slots.
            hidden: LSTM state before the first step.
            fresh: Bool ``[batch, seq]``, whether a step begins an episode; None if no step does.

        Returns:
            LSTM outputs ``[batch, seq, hidden]`` and the LSTM state after the last step.
        """
        blueprints = self.blueprints(blueprint_indices).flatten(start_dim=-2)
        x = self.features(torch.cat([state, blueprints], dim=-1))
        if not self.shape.recurrent:
            return self.norm(x), hidden
        starts = [0]
        if fresh is not None:
            starts += [int(t) for t in fresh[:, 1:].any(dim=0).nonzero().flatten() + 1]
        parts = []
        for begin, end in zip(starts, [*starts[1:], x.shape[1]], strict=True):
            if fresh is not None:
                keep = (~fresh[:, begin]).to(x.dtype).view(1, -1, 1)
                hidden = (hidden[0] * keep, hidden[1] * keep)
            part, hidden = self.lstm(x[:, begin:end], hidden)
            parts.append(part)
        return self.norm(torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]), hidden

    def head_logits(self, head: Head, encoded: Tensor, *chosen: Tensor) -> Tensor:
        """Return logits ``[..., value]`` of one head, given ``chosen``, the op and the slot."""
        context = [_one_hot(c, width) for c, width in zip(chosen, self._context(head), strict=False)]
        return self.heads[HEAD_NAMES[head]](torch.cat([encoded, *context], dim=-1))

    def _value(self, encoded: Tensor, op: Tensor | None) -> Tensor:
        if self.shape.critic == "op_value":
            if op is None:
                raise ValueError("an op-conditioned critic needs the op that will be taken")
            encoded = torch.cat([encoded, _one_hot(op, NUM_OPS)], dim=-1)
        return self.value_head(encoded).squeeze(-1)

    # --- decisions and values -----------------------------------------------------------------

    def forward(
        self,
        state: Tensor,
        blueprint_indices: Tensor,
        hidden: Hidden | None = None,
        op: Tensor | None = None,
        slot: Tensor | None = None,
        op_for_value: Tensor | None = None,
        **masks: Tensor,
    ) -> dict[str, Tensor | Hidden]:
        """Return the logits of all heads, the critic's value and the LSTM state, for inspection of a policy.

        Rollouts call ``get_action`` and policy updates ``evaluate_actions`` instead of ``forward``.

        Args:
            state: Observations ``[batch, seq, state_dim]``.
            blueprint_indices: Blueprint of every slot ``[batch, seq, slot]``, -1 for empty slots.
            hidden: LSTM state before the first step; zeros if not given.
            op: Op ``[batch, seq]`` that the other heads are conditioned on; sampled with torch's global
                generator if not given.
            slot: Slot ``[batch, seq]`` that the heads after the slot head are conditioned on; sampled if not
                given.
            op_for_value: Op ``[batch, seq]`` that the critic's value is conditioned on; ``op`` if not given.
            masks: Legal values, bool ``[batch, seq, value]``, by name: ``op_mask``, ``slot_mask``,
                ``blueprint_mask``, ``style_mask``, ``tempo_mask``, ``alpha_target_mask``,
                ``alpha_speed_mask``, ``alpha_curve_mask``. Masked values get the logit ``MASKED_LOG_PROB``.

        Returns:
            Dictionary with ``{head}_logits [batch, seq, value]``, ``value``, ``hidden``, ``op`` and ``slot``.
        """
        unknown = masks.keys() - {f"{name}_mask" for name in HEAD_NAMES}
        if unknown:
            raise TypeError(f"forward() has no mask named {', '.join(sorted(unknown))}")
        if hidden is None:
            hidden = self.get_initial_hidden(state.shape[0])
        encoded, hidden = self.encode(state, blueprint_indices, hidden)
        result: dict[str, Tensor | Hidden] = {}
        chosen: list[Tensor] = []
        for head, name, given in zip_longest(Head, HEAD_NAMES, (op, slot)):
            logits = mask_logits(self.head_logits(head, encoded, *chosen), masks.get(f"{name}_mask"))
            result[f"{name}_logits"] = logits
            if head <= Head.SLOT:
                chosen.append(_drawn(logits) if given is None else given)
        op, slot = chosen
        value = self._value(encoded, op if op_for_value is None else op_for_value)
        return {**result, "value": value, "hidden": hidden, "op": op, "slot": slot}

    def get_action(
        self,
        state: Tensor,
        blueprint_indices: Tensor,
        hidden: Hidden,
        masks: ActionMasks,
        *,
        uniforms: Tensor | None = None,
        deterministic: bool = False,
    ) -> PolicyDecision:
        """Return one decision of the policy per environment, sampled or argmax, on the policy's device.

        Nothing is read from the device; ``decide`` checks that every head had a legal value.

        Args:
            state: Observations ``[env, state_dim]``.
            blueprint_indices: Blueprint of every slot ``[env, slot]``, -1 for empty slots.
            hidden: LSTM state before the decision.
            masks: Legal actions of every environment.
            uniforms: Random numbers ``[env, head]`` in [0, 1) for sampling; needed unless ``deterministic``.
            deterministic: Choose the most probable value of each head instead of sampling.
        """
        if self._held:
            masks = masks.holding(self._held)
        encoded, hidden = self.encode(state.unsqueeze(1), blueprint_indices.unsqueeze(1), hidden)
        encoded = encoded.squeeze(1)
        num_envs = state.shape[0]
        actions = torch.zeros(num_envs, NUM_HEADS, dtype=torch.int64, device=state.device)
        log_probs = torch.zeros(num_envs, NUM_HEADS, device=state.device)
        used = []
        for head in Head:
            mask = masks.of_head(head, actions)
            logits = self.head_logits(head, encoded, actions[:, Head.OP], actions[:, Head.SLOT])
            distribution = MaskedCategorical(logits, mask, validate=False)
            if deterministic:
                actions[:, head] = distribution.mode
            elif uniforms is None:
                raise ValueError("a sampled decision needs uniforms [env, 8]")
            else:
                actions[:, head] = distribution.sample(uniforms[:, head])
            log_probs[:, head] = distribution.log_prob(actions[:, head])
            used.append(mask)
            if head is Head.OP:
                op_probs = distribution.probs
        value = self._value(encoded, actions[:, Head.OP])
        return PolicyDecision(actions, log_probs, torch.cat(used, dim=-1), op_probs, value, hidden)

    def evaluate_actions(
        self,
        state: Tensor,
        blueprint_indices: Tensor,
        actions: Tensor,
        masks: Tensor,
        hidden: Hidden,
        fresh: Tensor,
        sampled_op: Tensor | None = None,
    ) -> ActionEvaluation:
        """Return probabilities and values of stored decisions ``[env, step, …]`` under the present weights.

        Args:
            state: Observations ``[env, step, state_dim]``.
            blueprint_indices: Blueprint of every slot ``[env, step, slot]``, -1 for empty slots.
            actions: Chosen value of every head, ``[env, step, head]``.
            masks: Legal values of all heads, concatenated: ``[env, step, sum of head sizes]``.
            hidden: LSTM state before the first step.
            fresh: Bool ``[env, step]``, whether a step begins an episode.
            sampled_op: Op ``[env, step]`` that the critic's value is conditioned on; the op in ``actions`` if
                not given.
        """
        encoded, _ = self.encode(state, blueprint_indices, hidden, fresh)
        op, slot = actions[..., Head.OP], actions[..., Head.SLOT]
        log_probs, entropies, choices = [], [], []
        for head, mask in zip(Head, masks.split(list(self.sizes), dim=-1), strict=True):
            distribution = MaskedCategorical(self.head_logits(head, encoded, op, slot), mask)
            log_probs.append(distribution.log_prob(actions[..., head]))
            entropies.append(distribution.entropy())
            choices.append(distribution.has_choice)
        return ActionEvaluation(
            torch.stack(log_probs, dim=-1),
            torch.stack(entropies, dim=-1),
            torch.stack(choices, dim=-1),
            self._value(encoded, op if sampled_op is None else sampled_op),
        )

    def get_value(
        self, state: Tensor, blueprint_indices: Tensor, hidden: Hidden, op: Tensor | None = None
    ) -> Tensor:
        """Return the critic's value ``[env]`` of a state; the critic ``op_value`` also needs ``op [env]``."""
        encoded, _ = self.encode(state.unsqueeze(1), blueprint_indices.unsqueeze(1), hidden)
        return self._value(encoded.squeeze(1), op)


def _one_hot(values: Tensor, width: int) -> Tensor:
    """Return one-hot vectors ``[..., width]``; ``torch.nn.functional.one_hot`` reads the values on a CPU."""
    return (values.unsqueeze(-1) == torch.arange(width, device=values.device)).float()


def _drawn(logits: Tensor) -> Tensor:
    uniform = torch.rand(logits.shape[:-1], device=logits.device)
    return MaskedCategorical(logits, logits > MASKED_LOG_PROB).sample(uniform)


FactoredRecurrentActorCriticV2 = FactoredRecurrentActorCritic
"""Second name of the class, which the specification of Esper uses."""
