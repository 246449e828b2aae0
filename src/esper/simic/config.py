"""Configuration of a training: default, range and description of each hyper-parameter.

Every field is a flag of ``esper train`` and a key of a configuration file.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from esper.leyline import NUM_HEADS, Detail
from esper.leyline.thresholds import DEFAULT_TARGET_KL
from esper.simic.rewards.families import FAMILIES, FamilyName
from esper.simic.settings import MOST, MOST_SLOTS, EpisodeSettings

HeadName = Literal["op", "slot", "blueprint", "style", "tempo", "alpha_target", "alpha_speed", "alpha_curve"]


class PPOConfig(BaseModel):
    """Hyper-parameters of one policy update."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    update_epochs: int = Field(6, ge=1, le=MOST, description="Update epochs: gradient steps on each rollout.")
    learning_rate: float = Field(1e-3, gt=0, description="Learning rate of the policy's Adam optimiser.")
    clip: float = Field(0.2, gt=0, lt=1, description="Clipping range of the probability ratio.")
    clip_per_head: bool = Field(False, description="Clip the ratio of each head instead of the joint ratio.")
    target_kl: float = Field(
        DEFAULT_TARGET_KL, gt=0, description="KL divergence; update epochs stop beyond 1.5 times this."
    )
    gamma: float | None = Field(
        None, gt=0, le=1, description="Discount; the reward family's unless given (paired and sparse: 1)."
    )
    lam: float = Field(0.95, ge=0, le=1, description="Lambda of generalised advantage estimation (GAE).")
    entropy_start: float = Field(0.02, ge=0, description="Entropy coefficient of the first iteration.")
    entropy_end: float = Field(0.002, ge=0, description="Entropy coefficient of the last iteration.")
    entropy_floor: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Normalised entropy below which the blueprint and tempo heads are penalised, in the"
        " first 80 % of a training.",
    )
    value_coefficient: float = Field(0.5, ge=0, description="Weight of the value loss.")
    value_clip: float | None = Field(
        None, gt=0, le=MOST, description="Clipping range of value predictions; no clipping unless given."
    )
    max_grad_norm: float = Field(1.0, gt=0, description="Norm that the policy's gradient is clipped to.")

    @property
    def discount(self) -> float:
        """Discount factor of the update."""
        return 1.0 if self.gamma is None else self.gamma


class TrainingConfig(PPOConfig, EpisodeSettings):
    """Configuration of a policy training: environments, network, reward and update."""

    rng_seed: int = Field(0, ge=0, lt=1_000_000, description="Root of every random stream.")
    envs: int = Field(32, ge=1, le=MOST, description="Environments; each runs one episode per iteration.")
    iterations: int = Field(
        40, ge=1, le=MOST, description="Iterations: one episode per environment and one update."
    )
    slots: int | None = Field(
        None, ge=1, le=MOST_SLOTS, description="Blocks and so slots of the host; the preset's unless given."
    )
    vary_slots: bool = Field(False, description="Enable a random subset of the slots in every episode.")
    capacity: int | None = Field(
        None, ge=1, le=MOST_SLOTS, description="Slots of the policy's observation; the host's unless given."
    )
    context: bool = Field(
        False, description="Add features that distinguish task instances of different size and budget."
    )
    hidden_dim: int = Field(256, ge=8, le=MOST, description="Width of the policy network.")
    critic: Literal["state_value", "op_value"] = Field("state_value", description="V(s), or Q(s, op).")
    conditioned: bool = Field(True, description="Condition the heads on the op and the slot sampled first.")
    hold_heads: tuple[HeadName, ...] = Field(
        (), max_length=NUM_HEADS, description="Heads fixed at their canonical value (ablation)."
    )
    reward_family: FamilyName = Field(
        "paired",
        description="Reward: paired (score minus the ungrown twin's), contribution, loss, log_loss, sparse.",
    )
    rent: float = Field(
        0.01, ge=0, description="Cost of 1,000 grown parameters, as a fraction of 100 points of score."
    )
    reward_scale: float = Field(5.0, gt=0, description="Factor on every reward.")
    horizon_terminates: bool = Field(
        True, description="The horizon is a termination; else it is a truncation and the critic bootstraps."
    )
    evaluate_every: int = Field(
        5, ge=1, le=MOST, description="Iterations between evaluations on selection rng seeds."
    )
    evaluate_episodes: int = Field(16, ge=1, le=MOST, description="Episodes per evaluation.")
    checkpoint_every: int = Field(5, ge=1, le=MOST, description="Iterations between checkpoints.")
    detail: Detail = Field("standard", description="Detail of the rows of every episode.")

    @property
    def discount(self) -> float:
        return FAMILIES[self.reward_family].gamma if self.gamma is None else self.gamma

    @property
    def environments(self) -> int:
        return self.envs
