"""Recurrent actor-critic with eight factored heads, in float32 and not compiled (ADR 0023).

The policy is an autoregressive product of categorical distributions: the op is sampled first, then the slot,
then the other heads. ``conditioned`` heads get the sampled op and slot as one-hot inputs. Log-probabilities
and value of a decision belong to the same sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final, Literal, NamedTuple

import torch
import torch.nn.functional as F
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
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.distributions import MASKED_LOG_PROB, MaskedCategorical, mask_logits

Critic = Literal["state_value", "op_value"]
Hidden = tuple[Tensor, Tensor]
"""LSTM state (h, c), each ``[1, batch, hidden]``."""

HEAD_HIDDEN: Final = 128
MEMORY_STEPS: Final = 64
"""Longest initial memory of an LSTM cell in steps, T_max of the chrono initialisation."""
INITIAL_LOGITS: Final[Mapping[Head, Mapping[int, float]]] = {
    Head.OP: {LifecycleOp.WAIT: 1.0, LifecycleOp.PRUNE: -2.0},
    Head.ALPHA_TARGET: {AlphaTarget.FULL: 1.0},
}
"""Initial biases of the last layers of the heads.

With uniform initial choices two thirds of the seeds would stay below full alpha and never reach HOLDING, and
most seeds would be pruned.
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
        """Map indices ``[..., slot]``, -1 for empty, to vectors ``[..., slot, dim]``."""
        return self.embedding(torch.where(indices < 0, self.null_index, indices))


class PolicyDecision(NamedTuple):
    """One sampled (or argmax) decision per environment."""

    actions: Tensor
    """Chosen actions ``[env, 8]``."""
    log_probs: Tensor
    """Log-probabilities ``[env, 8]`` of the chosen values, 0 where a head had no choice."""
    masks: Tensor
    """Legal values of all heads, concatenated: bool ``[env, sum of head sizes]``."""
    op_probs: Tensor
    """Probabilities ``[env, op]`` of the ops, 0 for masked ops."""
    value: Tensor
    """Values of the critic ``[env]``."""
    hidden: Hidden

    def cpu(self) -> PolicyDecision:
        actions, log_probs, masks, op_probs, value = (tensor.cpu() for tensor in self[:5])
        memory = (self.hidden[0].cpu(), self.hidden[1].cpu())
        return PolicyDecision(actions, log_probs, masks, op_probs, value, memory)


class ActionEvaluation(NamedTuple):
    """Stored decisions evaluated with the present weights, every tensor ``[env, step, …]``."""

    log_probs: Tensor
    entropies: Tensor
    """Entropies ``[env, step, 8]`` of the heads, normalised by the number of legal values."""
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
    """Names of heads fixed at one value, see ``ActionMasks.holding``."""
    context: bool = False
    """Whether ``state_dim`` includes the context features."""


def _orthogonal(layer: nn.Linear, gain: float) -> nn.Linear:
    """Initialise a linear layer orthogonally (Saxe et al. 2014) with ``gain``."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def _chrono_init(bias: Tensor, hidden: int) -> None:
    """Set the gate biases by chrono initialisation (Tallec & Ollivier 2018).

    Forget biases b_f ~ log U(1, T_max − 1), input biases −b_f. Cells then start with memories of 1 to
    ``MEMORY_STEPS`` steps. With the customary forget bias of 1 a cell keeps 1e-7 of its content after 50
    steps, which is too little for a gradient (ADR 0013).
    """
    span = torch.empty(hidden).uniform_(1.0, MEMORY_STEPS - 1.0).log()
    bias[:hidden] = -span
    bias[hidden : 2 * hidden] = span


def _lstm(inputs: int, hidden: int) -> nn.LSTM:
    lstm = nn.LSTM(inputs, hidden, batch_first=True)
    for name, parameter in lstm.named_parameters():
        if "weight" in name:
            nn.init.orthogonal_(parameter)
        else:
            nn.init.zeros_(parameter)
        if name == "bias_ih_l0":
            _chrono_init(parameter.data, hidden)
    return lstm


def _head(inputs: int, hidden: tuple[int, ...], outputs: int, last_gain: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [_orthogonal(nn.Linear(inputs, width), math.sqrt(2)), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, _orthogonal(nn.Linear(inputs, outputs), last_gain))


class FactoredRecurrentActorCritic(nn.Module):
    """Policy network: observation and blueprint embeddings → LSTM → eight heads and a value.

    Args:
        state_dim: Length of an observation, see ``get_feature_size``.
        num_slots: Slots of the observation, the capacity of the policy.
        others: Further fields of ``PolicyShape``.
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
            _orthogonal(nn.Linear(inputs, feature_dim), math.sqrt(2)), nn.LayerNorm(feature_dim), nn.ReLU()
        )
        self.lstm = _lstm(feature_dim, hidden_dim)
        self.norm = nn.LayerNorm(hidden_dim)
        self.heads = nn.ModuleDict(
            {name: self._make_head(Head(index)) for index, name in enumerate(HEAD_NAMES)}
        )
        value_inputs = hidden_dim + (NUM_OPS if shape.critic == "op_value" else 0)
        self.value_head = _head(value_inputs, (HEAD_HIDDEN,), 1, 1.0)

    def _make_head(self, head: Head) -> nn.Sequential:
        hidden = (self.shape.hidden_dim, HEAD_HIDDEN) if head is Head.BLUEPRINT else (HEAD_HIDDEN,)
        made = _head(self.shape.hidden_dim + sum(self._context(head)), hidden, self.sizes[head], 0.01)
        last = made[-1]
        assert isinstance(last, nn.Linear)
        with torch.no_grad():
            for value, logit in INITIAL_LOGITS.get(head, {}).items():
                last.bias[value] = logit
        return made

    def _context(self, head: Head) -> tuple[int, ...]:
        """Return the widths of the one-hot inputs of a conditioned head: the op, then the slot."""
        return (NUM_OPS, self.num_slots)[:head] if self.shape.conditioned else ()

    def get_initial_hidden(self, batch: int) -> Hidden:
        """Return the LSTM state at the start of an episode, zeros ``[1, batch, hidden]``."""
        zeros = torch.zeros(1, batch, self.shape.hidden_dim, device=self.blueprints.null_index.device)
        return zeros, zeros.clone()

    # --- embedding and LSTM ---------------------------------------------------------------------------

    def encode(
        self, state: Tensor, blueprint_indices: Tensor, hidden: Hidden, fresh: Tensor | None = None
    ) -> tuple[Tensor, Hidden]:
        """Run embedding and LSTM over sequences, with the LSTM state reset where an episode begins.

        Args:
            state: Observations ``[batch, seq, state_dim]``.
            blueprint_indices: ``[batch, seq, slot]``, -1 for empty slots.
            hidden: LSTM state before the first step.
            fresh: Bool ``[batch, seq]``, steps that begin an episode; None if there are none.

        Returns:
            Features ``[batch, seq, hidden]`` and the LSTM state after the last step.
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
        """Return logits ``[..., values]`` of one head, given the op and slot chosen before."""
        context = [F.one_hot(c, width).float() for c, width in zip(chosen, self._context(head), strict=False)]
        return self.heads[HEAD_NAMES[head]](torch.cat([encoded, *context], dim=-1))

    def _value(self, encoded: Tensor, op: Tensor) -> Tensor:
        if self.shape.critic == "op_value":
            encoded = torch.cat([encoded, F.one_hot(op, NUM_OPS).float()], dim=-1)
        return self.value_head(encoded).squeeze(-1)

    # --- decisions and values -----------------------------------------------------------------

    def forward(
        self,
        state: Tensor,
        blueprint_indices: Tensor,
        hidden: Hidden | None = None,
        op: Tensor | None = None,
        slot: Tensor | None = None,
        **masks: Tensor,
    ) -> dict[str, Tensor | Hidden]:
        """Return the logits of all heads, the value and the LSTM state, for inspection of a policy.

        Rollout and update call ``get_action`` and ``evaluate_actions`` instead.

        Args:
            state: Observations ``[batch, seq, state_dim]``.
            blueprint_indices: ``[batch, seq, slot]``, -1 for empty slots.
            hidden: LSTM state before the first step; zeros if not given.
            op: Op ``[batch, seq]`` that the other heads are conditioned on; sampled with torch's global
                generator if not given.
            slot: Slot ``[batch, seq]`` that heads after op and slot are conditioned on; sampled if not given.
            masks: Bool tensors ``[batch, seq, values]`` by name: ``op_mask``, ``slot_mask``,
                ``blueprint_mask``, ``style_mask``, ``tempo_mask``, ``alpha_target_mask``,
                ``alpha_speed_mask``, ``alpha_curve_mask``. Masked values get the logit ``MASKED_LOG_PROB``.

        Returns:
            ``{head}_logits [batch, seq, values]`` for every head, ``value [batch, seq]``, ``hidden``, ``op``
            and ``slot``.
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
        return {**result, "value": self._value(encoded, op), "hidden": hidden, "op": op, "slot": slot}

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
        """Return one decision per environment.

        Args:
            state: Observations ``[env, state_dim]``.
            blueprint_indices: ``[env, slot]``, -1 for empty slots.
            hidden: LSTM state.
            masks: Legal actions.
            uniforms: Random numbers ``[env, 8]`` in [0, 1), one per head; needed unless ``deterministic``.
            deterministic: Take the most probable value of each head.
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
            masks.check(head, mask)
            logits = self.head_logits(head, encoded, actions[:, Head.OP], actions[:, Head.SLOT])
            distribution = MaskedCategorical(logits, mask)
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
    ) -> ActionEvaluation:
        """Evaluate stored decisions ``[env, step, …]`` with the present weights.

        Args:
            state: Observations ``[env, step, state_dim]``.
            blueprint_indices: ``[env, step, slot]``, -1 for empty slots.
            actions: ``[env, step, 8]``.
            masks: Legal values of all heads, concatenated: ``[env, step, sum of head sizes]``.
            hidden: LSTM state before the first step.
            fresh: Bool ``[env, step]``, steps that begin an episode.
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
            self._value(encoded, op),
        )

    def get_value(
        self, state: Tensor, blueprint_indices: Tensor, hidden: Hidden, op: Tensor | None = None
    ) -> Tensor:
        """Return the value ``[env]`` of a state; the critic ``op_value`` needs ``op [env]``."""
        encoded, _ = self.encode(state.unsqueeze(1), blueprint_indices.unsqueeze(1), hidden)
        if self.shape.critic == "op_value" and op is None:
            raise ValueError("an op-conditioned critic needs the op that will be taken")
        unused = torch.zeros(state.shape[0], dtype=torch.int64, device=state.device)
        return self._value(encoded.squeeze(1), unused if op is None else op)


def _drawn(logits: Tensor) -> Tensor:
    uniform = torch.rand(logits.shape[:-1], device=logits.device)
    return MaskedCategorical(logits, logits > MASKED_LOG_PROB).sample(uniform)
