"""Configuration of a policy training: default, range and description of each hyper-parameter.

Every field of ``TrainingConfig`` is a flag of ``esper train`` and a key of its configuration file.
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

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    update_epochs: int = Field(6, ge=1, le=MOST)
    """Update epochs: gradient steps on each rollout."""
    learning_rate: float = Field(0.001, gt=0)
    """Learning rate of the policy's Adam optimiser."""
    clip: float = Field(0.2, gt=0, lt=1)
    """Clipping range of the probability ratio."""
    clip_per_head: bool = False
    """Clip the ratio of each head instead of the joint ratio."""
    target_kl: float = Field(DEFAULT_TARGET_KL, gt=0)
    """Target KL divergence; an update stops when the divergence exceeds 1.5 times the target."""
    gamma: float | None = Field(None, gt=0, le=1)
    """Discount factor; the reward family's unless given (1 for paired, log_loss and sparse)."""
    lam: float = Field(0.95, ge=0, le=1)
    """Lambda of generalised advantage estimation (GAE)."""
    entropy_start: float = Field(0.02, ge=0)
    """Entropy coefficient of the first iteration."""
    entropy_end: float = Field(0.002, ge=0)
    """Entropy coefficient of the last iteration."""
    entropy_floor: float = Field(0.1, ge=0, le=1)
    """Normalised entropy below which the blueprint and tempo heads are penalised, in the first 80 % of a
    training.
    """
    value_coefficient: float = Field(0.5, ge=0)
    """Weight of the value loss."""
    value_clip: float | None = Field(None, gt=0, le=MOST)
    """Clipping range of value predictions; no clipping unless given."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Norm to which the policy's gradient is clipped."""

    @property
    def discount(self) -> float:
        """Discount factor of rewards in the policy update; 1 unless ``gamma`` is given."""
        return 1.0 if self.gamma is None else self.gamma


class TrainingConfig(PPOConfig, EpisodeSettings):
    """Configuration of a policy training: environments, network, reward and update."""

    rng_seed: int = Field(0, ge=0, lt=1000000)
    """Root rng seed of all random streams."""
    envs: int = Field(32, ge=1, le=MOST)
    """Number of environments; each runs one episode per iteration."""
    iterations: int = Field(40, ge=1, le=MOST)
    """Number of iterations, each with one episode per environment and one policy update."""
    slots: int | None = Field(None, ge=1, le=MOST_SLOTS)
    """Number of blocks of the host, each with one slot; the preset's number unless given."""
    vary_slots: bool = False
    """Enable a random subset of the slots in every episode."""
    capacity: int | None = Field(None, ge=1, le=MOST_SLOTS)
    """Number of slots in the policy's observation; the host's number unless given."""
    context: bool = False
    """Add features to the observation that distinguish task instances of different size and budget."""
    hidden_dim: int = Field(256, ge=8, le=MOST)
    """Width of the policy network."""
    critic: Literal["state_value", "op_value"] = "state_value"
    """Kind of critic: state_value V(s), or op_value Q(s, op)."""
    conditioned: bool = True
    """Give the sampled op and slot as inputs to the heads that are sampled after them."""
    hold_heads: tuple[HeadName, ...] = Field((), max_length=NUM_HEADS)
    """Names of action heads that are fixed at their canonical value, as an ablation."""
    reward_family: FamilyName = "paired"
    """Reward: paired (score minus the ungrown twin's), contribution, loss, log_loss, sparse."""
    rent: float = Field(0.01, ge=0)
    """Cost of 1,000 grown parameters, as a fraction of 100 points of score."""
    reward_scale: float = Field(5.0, gt=0)
    """Factor by which every reward is multiplied."""
    horizon_terminates: bool = True
    """Treat the horizon as a termination; otherwise it is a truncation and the critic bootstraps."""
    evaluate_every: int = Field(5, ge=1, le=MOST)
    """Number of iterations between evaluations of the policy on selection rng seeds."""
    evaluate_episodes: int = Field(16, ge=1, le=MOST)
    """Number of episodes per evaluation of the policy."""
    checkpoint_every: int = Field(1, ge=1, le=MOST)
    """Number of iterations between checkpoints."""
    detail: Detail = "standard"
    """Level of detail of the telemetry rows of every episode."""

    @property
    def discount(self) -> float:
        return FAMILIES[self.reward_family].gamma if self.gamma is None else self.gamma

    @property
    def environments(self) -> int:
        return self.envs
