"""Settings that runs, trainings and studies share, and the configuration of a policy training.

The module has field types, ranges, hardware and episodes, and default, range and description of each
hyper-parameter of a policy training. Every field of ``TrainingConfig`` is a flag of ``esper train`` and a key
of its configuration file.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core.core_schema import ValidationInfo

from esper.leyline import NUM_HEADS, Detail, EsperError
from esper.leyline.thresholds import DEFAULT_TARGET_KL
from esper.simic.rewards.families import FAMILIES, FamilyName

MOST: Final = 1_000_000
"""Largest number that a setting such as ``steps``, ``envs`` or ``iterations`` accepts."""
MOST_SLOTS: Final = 1_000


@contextmanager
def _collected() -> Iterator[None]:
    """Convert ``EsperError`` to ``ValueError``, which pydantic reports with all other invalid settings."""
    try:
        yield
    except EsperError as error:
        raise ValueError(str(error)) from None


def _known_task(name: str, others: ValidationInfo) -> str:
    from esper.tolaria.tasks import task_named  # noqa: PLC0415  The module loads torch, which --help does not need.

    with _collected():
        task_named(name, others.data.get("data"))
    return name


def _known_devices(names: tuple[str, ...]) -> tuple[str, ...]:
    from esper.tolaria.devices import check_devices  # noqa: PLC0415  loads torch

    with _collected():
        check_devices(names)
    return names


TaskName = Annotated[str, AfterValidator(_known_task)]
"""Name of a task. A field ``data`` must precede the field of this type, if the settings have one."""
PREFIXES: Final = {"": 1, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}


def _flops(given: object) -> object:
    """Convert text such as 0.5T or 3e9, or a number, to a number of FLOPs."""
    found = re.fullmatch(r"(\d{1,19}(?:\.\d{1,9})?(?:e\d{1,2})?)([MGTP]?)", str(given))
    if found is None or isinstance(given, bool):
        raise ValueError("a budget is a number of FLOPs such as 0.5T, 200G or 3e9")
    return round(float(found[1]) * PREFIXES[found[2]])


Flops = Annotated[int, BeforeValidator(_flops), Field(ge=1, le=10**18)]
DeviceName = Annotated[str, AfterValidator(lambda name: _known_devices((name,))[0])]
DeviceNames = Annotated[tuple[str, ...], Field(max_length=MOST_SLOTS), AfterValidator(_known_devices)]
AmpName = Literal["off", "bfloat16", "float16"]


class Hardware(BaseModel):
    """Settings for the devices of hosts and policy, and for the precision of training."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    devices: DeviceNames = ("cpu",)
    """Devices of the hosts: cpu, cuda, or cuda:0 cuda:1 …; environments are assigned to them in turn."""
    policy_device: DeviceName = "cpu"
    """Device of the policy network."""
    amp: AmpName = "off"
    """Mixed precision of hosts and seeds in training."""

    @model_validator(mode="after")
    def _devices_can(self) -> Self:
        from esper.tolaria.devices import check_amp, check_enough  # noqa: PLC0415  loads torch

        with _collected():
            check_amp(self.amp, self.devices)
            check_enough(self.devices, self.environments)
        return self

    @property
    def environments(self) -> int:
        """Number of hosts that are trained at the same time."""
        return 1


class EpisodeSettings(Hardware):
    """Settings for the task and the length of its episodes, shared by runs and policy trainings."""

    data: Path | None = None
    """File of the task text_scaling, or folder of the task image_scaling."""
    task: TaskName = "digits_impaired"
    """Task: a preset, or package.module:function that returns a task."""
    steps: int | None = Field(None, ge=1, le=MOST)
    """Number of epochs per episode; the preset's number unless given."""
    budget: Flops | None = None
    """FLOPs of an episode, such as 0.5T; if budgets vary, the largest; the preset's number unless given."""
    auto_forward: bool = True
    """Let seeds change stage automatically; otherwise a seed needs the op ADVANCE."""

    @model_validator(mode="after")
    def _has_one_length(self) -> Self:
        if self.budget is not None and self.steps is not None:
            raise ValueError("budget and steps both set the length of an episode; leave one of them out")
        return self


# --- policy training ----------------------------------------------------------------------------------

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
