"""Proximal policy optimisation (PPO) of a recurrent policy.

Each update epoch evaluates the whole rollout from the stored initial LSTM state and takes one gradient step.
The policy gradient is summed over fixed shards of environments, in shard order.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm

from esper.leyline import HEAD_NAMES, NUM_HEADS, EsperError, known
from esper.simic import diagnostics, losses
from esper.simic.advantages import gae, normalise
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.config import PPOConfig
from esper.tamiyo.networks.factored_lstm import ActionEvaluation, FactoredRecurrentActorCritic

KL_STOP: Final = 1.5
"""Ratio of KL divergence to its target beyond which a policy update takes no more gradient steps."""
KEEP_OPEN_UNTIL: Final = 0.8
"""Share of a training, from its start, in which the blueprint and tempo heads have an entropy floor."""
CLOSING_WEIGHT: Final = 2.0
"""Weight, in the loss, of the penalty for head entropies below the entropy floor.

A penalty weight of 0.5 does not prevent entropy collapse on the bandit oracle, where advantages reach several
standard deviations.
"""
MAX_SKIPPED: Final = 3
"""Number of skipped policy updates in a row after which a training stops."""


class PolicyDivergedError(EsperError):
    """Error: ``MAX_SKIPPED`` policy updates in a row had non-finite numbers and were skipped."""


@dataclass(slots=True)
class UpdateMetrics:
    """Metrics of one policy update; the telemetry table ``UpdateRow`` documents each metric by name."""

    policy_loss: float = 0.0
    value_loss: float = 0.0
    entropy: float = 0.0
    head_entropy: list[float | None] = field(default_factory=list)
    explained_variance: float = 0.0
    value_nrmse: float = 0.0
    value_return_correlation: float | None = None
    approx_kl: float = 0.0
    clip_fraction: float = 0.0
    ratio_mean: float = 1.0
    ratio_std: float = 0.0
    ratio_max: float = 1.0
    ratio_min: float = 1.0
    first_ratio_error: float = 0.0
    update_epochs: int = 0
    early_stop_update_epoch: int | None = None
    grad_norm: float = 0.0
    head_grad_norm: list[float] = field(default_factory=list)
    forced_share: float = 0.0
    skipped: str | None = None
    explosion: diagnostics.RatioExplosionDiagnostic | None = None

    def columns(self) -> dict[str, Any]:
        """Return the metrics of the policy update by name, with ``None`` for non-finite numbers."""
        return known(asdict(self))


@dataclass(frozen=True, slots=True)
class Batch:
    """One rollout with its advantages, returns and entropy coefficients."""

    buffer: TamiyoRolloutBuffer
    advantages: Tensor
    returns: Tensor
    free_rows: int
    """Number of steps with more than one legal action, the divisor of policy loss and entropy bonus."""
    entropy_weight: float
    entropy_floor: float


class PPOAgent:
    """Policy with its Adam optimiser, updated by PPO (Schulman et al. 2017).

    Args:
        policy: Policy network to train.
        config: Hyper-parameters of the policy update.
        envs_per_backward: Number of environments per backward pass; a smaller number needs less memory.
    """

    def __init__(
        self, policy: FactoredRecurrentActorCritic, config: PPOConfig, *, envs_per_backward: int = 8
    ) -> None:
        self.policy = policy
        self.config = config
        self._envs_per_backward = envs_per_backward
        self.optimiser = torch.optim.Adam(
            policy.parameters(), lr=config.learning_rate, eps=1e-5, foreach=True
        )
        self.skipped_in_a_row = 0

    def update(self, buffer: TamiyoRolloutBuffer, progress: float) -> UpdateMetrics:
        """Update the policy on one rollout; ``progress`` in [0, 1] is the share of the training done.

        An update with non-finite numbers is skipped, with the reason in ``UpdateMetrics.skipped``.

        Raises:
            PolicyDivergedError: ``MAX_SKIPPED`` updates in a row were skipped.
        """
        config = self.config
        buffer = buffer.to(next(self.policy.parameters()).device)
        rows = (buffer.rewards, buffer.values, buffer.next_values, buffer.terminated, buffer.ended)
        advantages = gae(*rows, gamma=config.discount, lam=config.lam)
        returns = advantages + buffer.values
        broken = diagnostics.first_non_finite(
            reward=buffer.rewards, value=buffer.values, next_value=buffer.next_values, target=returns
        )
        if broken is not None:
            return self._skip(UpdateMetrics(), broken)
        free = has_choice(buffer.masks, self.policy.sizes)
        metrics = UpdateMetrics(
            explained_variance=diagnostics.explained_variance(buffer.values, returns),
            value_nrmse=diagnostics.value_nrmse(buffer.values, returns),
            value_return_correlation=diagnostics.correlation(buffer.values, returns),
            forced_share=1.0 - float(free.float().mean()),
        )
        batch = Batch(
            buffer=buffer,
            advantages=normalise(advantages, free),
            returns=returns,
            free_rows=max(int(free.sum()), 1),
            entropy_weight=config.entropy_start + (config.entropy_end - config.entropy_start) * progress,
            entropy_floor=config.entropy_floor if progress < KEEP_OPEN_UNTIL else 0.0,
        )
        for number in range(config.update_epochs):
            if not self._update_epoch(batch, number, metrics):
                break
        if metrics.skipped is None:
            self.skipped_in_a_row = 0
        return metrics

    def _update_epoch(self, batch: Batch, number: int, metrics: UpdateMetrics) -> bool:
        """Take one gradient step on the whole rollout; return False if the update stopped before the step."""
        self.optimiser.zero_grad()
        metrics.policy_loss = metrics.value_loss = metrics.entropy = 0.0
        parts = shards(len(batch.returns), self._envs_per_backward)
        log_ratios, evaluations = zip(*(self._shard(batch, part, metrics) for part in parts), strict=True)
        log_ratio = torch.cat(log_ratios)
        kl = float(losses.approximate_kl(log_ratio).sum()) / batch.free_rows
        # Metrics are stored before the policy update can stop early, since they show why it stopped.
        self._describe(metrics, evaluations, batch, log_ratio)
        metrics.approx_kl = kl
        if number == 0:
            metrics.first_ratio_error = float((log_ratio.exp() - 1).abs().max())
            heads = (self.policy.heads[name].parameters() for name in HEAD_NAMES)
            metrics.head_grad_norm = [
                float(get_total_norm([p.grad for p in head if p.grad is not None])) for head in heads
            ]
        if number > 0 and kl > KL_STOP * self.config.target_kl:
            metrics.early_stop_update_epoch = number
            return False
        norm = float(clip_grad_norm_(self.policy.parameters(), self.config.max_grad_norm))
        loss = metrics.policy_loss + metrics.value_loss
        if not all(map(math.isfinite, (norm, kl, loss))):
            self._skip(metrics, f"update epoch {number}: gradient norm {norm}, KL {kl}, loss {loss}")
            return False
        metrics.grad_norm = norm
        self.optimiser.step()
        metrics.update_epochs = number + 1
        return True

    def _shard(self, batch: Batch, shard: slice, metrics: UpdateMetrics) -> tuple[Tensor, ActionEvaluation]:
        """Add the gradient of one shard of environments to the gradient of the policy's parameters, and its
        losses to ``metrics``; return log ratios and action probabilities."""
        config, buffer = self.config, batch.buffer
        evaluation = self.policy.evaluate_actions(*buffer.get_batched_sequences(shard))
        policy = losses.policy_loss(
            evaluation.log_probs,
            buffer.log_probs[shard],
            batch.advantages[shard],
            clip=config.clip,
            rows=batch.free_rows,
            per_head=config.clip_per_head,
        )
        value = losses.value_loss(
            evaluation.value,
            buffer.values[shard],
            batch.returns[shard],
            clip=config.value_clip,
            rows=batch.returns.numel(),
        )
        bonus = losses.entropy_bonus(evaluation.entropies, evaluation.has_choice, rows=batch.free_rows)
        closing = losses.closing_penalty(
            evaluation.entropies, evaluation.has_choice, floor=batch.entropy_floor, rows=batch.free_rows
        )
        exploration = batch.entropy_weight * bonus - CLOSING_WEIGHT * closing
        (policy.loss + config.value_coefficient * value - exploration).backward()
        metrics.policy_loss += policy.loss.item()
        metrics.value_loss += value.item()
        metrics.entropy += bonus.item()
        return policy.log_ratio.detach(), ActionEvaluation(*(tensor.detach() for tensor in evaluation))

    def _describe(
        self, metrics: UpdateMetrics, evaluations: Sequence[ActionEvaluation], batch: Batch, log_ratio: Tensor
    ) -> None:
        ratio = log_ratio.exp()
        log_probs, entropies, free, _ = map(torch.cat, zip(*evaluations, strict=True))
        counts, sums = free.sum(dim=(0, 1)), (entropies * free).sum(dim=(0, 1))
        metrics.head_entropy = [
            float(sums[head] / counts[head]) if counts[head] else None for head in range(NUM_HEADS)
        ]
        clipped = ((ratio - 1).abs() > self.config.clip) & free.any(dim=-1)
        metrics.clip_fraction = float(clipped.sum()) / batch.free_rows
        metrics.ratio_mean, metrics.ratio_std = float(ratio.mean()), float(ratio.std(correction=0))
        metrics.ratio_max, metrics.ratio_min = float(ratio.max()), float(ratio.min())
        metrics.explosion = metrics.explosion or diagnostics.RatioExplosionDiagnostic.of(
            log_ratio, log_probs, batch.buffer.log_probs, batch.buffer.actions
        )

    def _skip(self, metrics: UpdateMetrics, reason: str) -> UpdateMetrics:
        metrics.skipped = reason
        self.optimiser.zero_grad()
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= MAX_SKIPPED:
            raise PolicyDivergedError(f"{MAX_SKIPPED} updates in a row were not finite; the last: {reason}")
        return metrics


def shards(num_envs: int, size: int) -> list[slice]:
    """Return slices (shards) of ``size`` consecutive environments; the last slice may be smaller."""
    return [slice(start, start + size) for start in range(0, num_envs, size)]


def has_choice(masks: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return bool ``[env, step]``: whether at least one head had more than one legal value in a step.

    ``masks [env, step, sum of head sizes]`` are the masks of all heads, concatenated.
    """
    return torch.stack([mask.sum(dim=-1) > 1 for mask in masks.split(list(sizes), dim=-1)]).any(dim=0)
