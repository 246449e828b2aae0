"""Row types of all telemetry tables, the interface between the code that measures and the code that writes or
displays telemetry.

Telemetry rows are immutable. A producer passes a telemetry row to its sink; the writer adds the time when it
encodes the row. Names of slots, heads, ops and blueprints are stored once, in the run row; other tables refer
to them by index, so that row types do not depend on the number of slots or heads. In a telemetry row ``None``
means unknown; 0 never does.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec

from esper.leyline import thresholds as limits
from esper.leyline.stages import Stage

Cause = Literal["policy", "mechanical", "governor", "user"]
MetricColumn = Literal["val_score", "val_loss"]
Severity = Literal["warning", "error"]
Terms = dict[str, float | None]
"""Terms of a reward by name; None for a term that is not finite."""

OptFloat = float | None
"""Number, or None if the number is unknown."""

UNIT_RANGES: Final[Mapping[str, tuple[float, float]]] = {"fraction": (0.0, 1.0), "score": (0.0, 100.0)}
"""Lowest and highest possible value of each unit that has a limited range."""


@dataclass(frozen=True, slots=True)
class Column:
    """Unit, meaning and normal range of a column of a telemetry table."""

    unit: str
    meaning: str
    low: float | None = None
    high: float | None = None
    """Lower and upper limit of the normal range of the column; None for no limit."""


class GateVerdict(NamedTuple):
    """Result of a gate: names of the checks that passed, and of the checks that failed."""

    gate: str
    passed: tuple[str, ...]
    failed: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.failed


class StageMove(NamedTuple):
    """Change of a slot from one stage to another, with its cause."""

    env: int
    slot: int
    seed_id: int
    blueprint: int
    origin: Stage
    target: Stage
    cause: Cause
    reason: str
    verdict: GateVerdict | None
    age: int
    contribution: float
    """Contribution of the seed at the time of the stage change; NaN if not measured."""


def known(value: Any) -> Any:
    """Return ``value`` with every non-finite number, also in nested lists and dicts, replaced by None."""
    if isinstance(value, dict):
        return {name: known(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [known(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Columns that all telemetry tables have."""

    t: Annotated[float, Column("s", "Seconds since the run began, stamped by the writer.")] = 0.0


class EnvRow(Row, frozen=True, kw_only=True):
    """Columns that all telemetry tables about single episodes have."""

    env: Annotated[int, Column("index", "Environment within the run.")]
    episode: Annotated[int, Column("index", "Episode within the environment.")]
    attempt: Annotated[int, Column("index", "Earlier attempts at this episode that diverged.")] = 0
    iteration: Annotated[int | None, Column("iteration", "Training iteration, from 1; null: none.")] = None
    epoch: Annotated[int, Column("epoch", "Host epochs finished so far; 0 is the untrained host.")]


class RunRow(Row, frozen=True, kw_only=True):
    """Table ``run``, one row per run: configuration, environment, and the names that indices in other tables
    refer to."""

    schema_version: Annotated[int, Column("version", "Raised when a column changes its meaning.")]
    name: Annotated[str, Column("name", "Name of the run; default: name of its directory.")]
    started: Annotated[str, Column("UTC", "Wall-clock time at which the run began, ISO 8601.")]
    task: Annotated[str, Column("name", "Task preset, or the class of a user's own network.")]
    controller: Annotated[str, Column("name", "Controller.")]
    rng_seed: Annotated[int | None, Column("seed", "Root of every random stream; null: user's own.")]
    config: Annotated[dict[str, Any], Column("map", "The whole configuration.")]
    data_hash: Annotated[str | None, Column("hash", "Hash of the task's data; null: user's data.")]
    git_revision: Annotated[str | None, Column("hash", "Revision of the code, if it is a checkout.")]
    versions: Annotated[dict[str, str], Column("map", "Versions of Python and of the libraries used.")]
    hardware: Annotated[dict[str, Any], Column("map", "Machine, processor count, devices.")]
    host_params: Annotated[int, Column("count", "Trainable parameters of the bare host.")]
    slots: Annotated[list[str], Column("names", "Slot ids, upstream first.")]
    ops: Annotated[list[str], Column("names", "Ops in index order.")]
    heads: Annotated[list[str], Column("names", "Action heads in index order.")]
    blueprints: Annotated[list[str], Column("names", "Blueprints in index order.")]
    stages: Annotated[list[str], Column("names", "Stages in index order.")]
    head_choices: Annotated[list[list[str]], Column("names", "Choices of each head in index order.")]
    horizon: Annotated[int | None, Column("epoch", "Epochs of an episode; null: a compute budget ends it.")]
    metric: Annotated[MetricColumn, Column("name", "Metric of decisions: val_score or val_loss.")] = (
        "val_score"
    )
    iterations: Annotated[int | None, Column("iteration", "Iterations of a training; null: not a training.")]
    envs: Annotated[int, Column("count", "Number of environments.")]
    devices: Annotated[list[str], Column("names", "Device of each environment, in their order.")] = []


class EpochRow(EnvRow, frozen=True, kw_only=True):
    """Table ``epoch``: one row per environment and epoch."""

    train_loss: Annotated[OptFloat, Column("nats", "Mean training loss over the epoch.")]
    train_score: Annotated[OptFloat, Column("score", "Training score over the epoch, 0-100.")]
    val_loss: Annotated[OptFloat, Column("nats", "Validation loss after the epoch.")]
    val_score: Annotated[OptFloat, Column("score", "Validation score after the epoch, 0-100.")]
    twin_score: Annotated[OptFloat, Column("score", "Validation score of the do-nothing twin.")]
    params: Annotated[int, Column("count", "Parameters of host and seeds together.")]
    grown_params: Annotated[int, Column("count", "Parameters of the seeds.")]
    host_gradient_norm: Annotated[OptFloat, Column("norm", "Mean norm before clipping, host only.")]
    learning_rate: Annotated[float, Column("rate", "The host's learning rate at the end of the epoch.")]
    skipped_batches: Annotated[int, Column("count", "Minibatches left out as non-finite.")]
    skipped_steps: Annotated[int, Column("count", "Optimiser steps skipped: float16 overflow.")] = 0
    ms: Annotated[float, Column("ms", "Time of the whole step, with waiting for the device.")]
    phase_ms: Annotated[dict[str, float], Column("ms", "Time by phase: act, train, measure and the rest.")]


class SeedRow(EnvRow, frozen=True, kw_only=True):
    """Table ``seed``: one row per seed and epoch, from germination to removal."""

    slot: Annotated[int, Column("index", "Slot of the seed.")]
    seed: Annotated[int, Column("index", "Serial number of the seed within its episode.")]
    blueprint: Annotated[int, Column("index", "Blueprint of the seed.")]
    style: Annotated[int, Column("index", "Blend style.")]
    stage: Annotated[int, Column("index", "Stage after the automatic stage moves of the epoch.")]
    age: Annotated[int, Column("epoch", "Epochs since germination.")]
    alpha: Annotated[float, Column("fraction", "Blend weight in the next epoch.")]
    contribution: Annotated[OptFloat, Column("points", "Score lost, or loss added, with this slot off.")]
    contribution_error: Annotated[OptFloat, Column("points", "Standard error of the contribution.")]
    shapley: Annotated[OptFloat, Column("points", "Exact or sampled Shapley value.")]
    interaction_sum: Annotated[OptFloat, Column("points", "Sum of pair interactions.")]
    freshness: Annotated[float, Column("fraction", "1: just measured, then decaying; 0: never.")]
    gradient_norm: Annotated[OptFloat, Column("norm", "Gradient norm before clipping.")]
    gradient_health: Annotated[
        OptFloat, Column("fraction", "1 is healthy, 0 is not.", limits.MIN_GRADIENT_HEALTH)
    ]
    params: Annotated[int, Column("count", "Parameters of the seed.")]


class TransitionRow(EnvRow, frozen=True, kw_only=True):
    """Table ``transition``: one row per stage change of a slot."""

    slot: Annotated[int, Column("index", "Slot of the seed.")]
    seed: Annotated[int, Column("index", "Serial number of the seed; -1 where the slot is empty.")]
    blueprint: Annotated[int, Column("index", "Blueprint; -1 where the slot is empty.")]
    from_stage: Annotated[int, Column("index", "Stage before.")]
    to_stage: Annotated[int, Column("index", "Stage after.")]
    cause: Annotated[Cause, Column("name", "Cause: policy, mechanical, governor or user.")]
    reason: Annotated[str, Column("text", "Reason in a few words.")]
    gate: Annotated[str | None, Column("name", "Gate that allowed the move; null: no gate.")]
    passed: Annotated[list[str], Column("names", "Checks of the gate that passed.")]
    score: Annotated[OptFloat, Column("score", "Validation score last measured.")]
    contribution: Annotated[OptFloat, Column("points", "Contribution last measured.")]
    age: Annotated[int, Column("epoch", "Epochs since germination.")]


class DecisionRow(EnvRow, frozen=True, kw_only=True):
    """Table ``decision``, one row per environment and step: the action chosen before the epoch, and its
    result.

    Columns of a policy (``masked``, ``log_probs``, ``op_probs``, ``value``) are null for other controllers;
    rewards are null if no policy is trained.
    """

    action: Annotated[list[int], Column("indices", "Values of the eight heads, canonical where not read.")]
    read: Annotated[list[bool], Column("flags", "Heads that the op reads.")]
    forced: Annotated[bool, Column("flag", "Nothing but WAIT was legal.")]
    succeeded: Annotated[bool, Column("flag", "The action was carried out.")]
    refused_by: Annotated[str | None, Column("name", "Gate, or 'legality', that refused it.")]
    failed_checks: Annotated[list[str], Column("names", "Checks that failed.")]
    masked: Annotated[list[bool] | None, Column("flags", "Per head: some choices were masked.")] = None
    log_probs: Annotated[list[OptFloat] | None, Column("nats", "Log-probabilities of chosen values.")] = None
    op_probs: Annotated[list[OptFloat] | None, Column("fraction", "Probabilities of all ops.")] = None
    value: Annotated[OptFloat, Column("reward", "Return predicted by the critic.")] = None
    reward: Annotated[OptFloat, Column("reward", "Reward of the decision.")] = None
    reward_terms: Annotated[Terms | None, Column("reward", "Reward by term.")] = None


class CounterfactualRow(EnvRow, frozen=True, kw_only=True):
    """Table ``counterfactual``: one row per evaluated on/off configuration of the seeds."""

    on: Annotated[list[bool], Column("flags", "Slots that were on, in slot order.")]
    score: Annotated[OptFloat, Column("score", "Validation score of this configuration.")]
    loss: Annotated[float, Column("nats", "Validation loss of this configuration.")]


class AlertRow(Row, frozen=True, kw_only=True):
    """Table ``alert``: one row per alert that was raised or cleared, and one per intervention by the
    governor."""

    rule: Annotated[str, Column("name", "Name of the alert rule.")]
    event: Annotated[Literal["raised", "cleared"], Column("name", "Raised or cleared.")]
    severity: Annotated[Severity, Column("name", "warning or error.")]
    scope: Annotated[str, Column("text", "Subject of the alert: a head, a slot, the run ...")]
    value: Annotated[OptFloat, Column("any", "Value found; null: not finite, or not a number.")]
    limit: Annotated[OptFloat, Column("any", "Threshold of the value; null: the value must be finite.")]
    hint: Annotated[str, Column("text", "What to do, or what the governor did.")]
    env: Annotated[int | None, Column("index", "Environment; null: concerns none.")] = None
    episode: Annotated[int | None, Column("index", "Episode; null: concerns none.")] = None
    attempt: Annotated[int | None, Column("index", "Attempt at the episode; null: concerns none.")] = None
    epoch: Annotated[int | None, Column("epoch", "Host epochs finished; null: outside an episode.")] = None
    iteration: Annotated[int | None, Column("iteration", "Training iteration; null: outside a training.")] = (
        None
    )


class EpisodeRow(EnvRow, frozen=True, kw_only=True):
    """Table ``episode``: one row per episode, written after its seeds were committed."""

    val_score: Annotated[OptFloat, Column("score", "Validation score of the committed network.")]
    val_loss: Annotated[OptFloat, Column("nats", "Validation loss of the committed network.")] = None
    test_score: Annotated[OptFloat, Column("score", "Test score of the committed network.")]
    twin_val_score: Annotated[OptFloat, Column("score", "The twin's final validation score.")]
    best_val_score: Annotated[OptFloat, Column("score", "Best validation score of the episode.")]
    host_params: Annotated[int, Column("count", "Parameters of the bare host.")]
    params: Annotated[int, Column("count", "Parameters of the committed network.")]
    host_flops_per_sample: Annotated[int, Column("FLOP", "One forward pass of the bare host.")]
    flops_per_sample: Annotated[int, Column("FLOP", "One forward pass of the committed network.")]
    flops: Annotated[dict[str, int], Column("FLOP", "Counted compute of the whole episode by purpose.")]
    op_counts: Annotated[list[int], Column("count", "Number of decisions per op.")]
    refused: Annotated[int, Column("count", "Actions that were refused.")]
    rollbacks: Annotated[int, Column("count", "Rollbacks to an earlier state.")]
    ended_by: Annotated[str, Column("name", "Why the episode ended: horizon, budget, or governor.")]
    seconds: Annotated[float, Column("s", "Time of the whole episode.")]
    total_reward: Annotated[OptFloat, Column("reward", "Undiscounted return; null: no rewards.")] = None
    reward_terms: Annotated[Terms | None, Column("reward", "Return by term.")] = None


class UpdateRow(Row, frozen=True, kw_only=True):
    """Table ``update``, one row per training iteration: statistics of its episodes, and metrics of the policy
    update.

    Non-finite metrics of the update are null.
    """

    iteration: Annotated[int, Column("iteration", "Iterations finished, this one included.")]
    mean_return: Annotated[OptFloat, Column("reward", "Mean undiscounted return of the environments.")]
    reward_terms: Annotated[Terms, Column("reward", "Mean return by term.")]
    reward_variance: Annotated[OptFloat, Column("reward²", "Variance of rewards over all decisions.")]
    reward_variance_unpaired: Annotated[OptFloat, Column("reward²", "Variance without twin; null: no twin.")]
    val_score: Annotated[OptFloat, Column("score", "Mean validation score of the committed networks.")]
    params: Annotated[OptFloat, Column("count", "Mean parameters of the committed networks.")]
    broken_episodes: Annotated[int, Column("count", "Episodes that ended because the host diverged.", high=0)]
    op_shares: Annotated[list[float], Column("fraction", "Share of each op among all decisions.")]
    policy_loss: Annotated[OptFloat, Column("loss", "Clipped surrogate of the last update epoch.")]
    value_loss: Annotated[OptFloat, Column("loss", "Half the squared error, last update epoch.")]
    entropy: Annotated[OptFloat, Column("bonus", "Weighted entropy of the heads that had a choice.")]
    head_entropy: Annotated[
        list[OptFloat],
        Column("fraction", "Per head, 1: uniform; null: not read.", low=limits.HEAD_ENTROPY_COLLAPSED),
    ]
    explained_variance: Annotated[OptFloat, Column("ratio", "Explained variance of the returns.", low=0.3)]
    value_nrmse: Annotated[
        OptFloat, Column("ratio", "Normalised RMS error of values.", high=limits.VALUE_NRMSE)
    ]
    value_return_correlation: Annotated[OptFloat, Column("correlation", "Correlation of values and returns.")]
    approx_kl: Annotated[
        OptFloat,
        Column("nats", "KL from the rollout's policy.", high=limits.KL_HIGH * limits.DEFAULT_TARGET_KL),
    ]
    clip_fraction: Annotated[float, Column("fraction", "Clipped rows with a choice.", high=limits.CLIP_SHARE)]
    ratio_mean: Annotated[OptFloat, Column("ratio", "New over old probability, mean.")]
    ratio_std: Annotated[OptFloat, Column("ratio", "New over old probability, standard deviation.")]
    ratio_max: Annotated[OptFloat, Column("ratio", "Largest probability ratio.", high=limits.RATIO_RANGE[1])]
    ratio_min: Annotated[OptFloat, Column("ratio", "Smallest probability ratio.", low=limits.RATIO_RANGE[0])]
    first_ratio_error: Annotated[
        OptFloat, Column("ratio", "Largest ratio error, first update epoch.", high=1e-4)
    ]
    update_epochs: Annotated[int, Column("count", "Update epochs completed (optimiser steps).")]
    early_stop_update_epoch: Annotated[int | None, Column("update epoch", "Stopped by the KL; null: none.")]
    grad_norm: Annotated[
        float, Column("norm", "Before clipping, last update epoch.", high=limits.POLICY_GRADIENT_EXPLODING)
    ]
    head_grad_norm: Annotated[list[OptFloat], Column("norm", "Per head, in the first update epoch.")]
    forced_share: Annotated[float, Column("fraction", "Rows without any choice.", high=limits.FORCED_SHARE)]
    skipped: Annotated[str | None, Column("text", "Reason why the update was skipped; null: not skipped.")]
    explosion: Annotated[dict[str, Any] | None, Column("map", "Decision with an extreme ratio.")]
    evaluation_return: Annotated[OptFloat, Column("reward", "Mean return on selection rng seeds.")]
    evaluation_score: Annotated[OptFloat, Column("score", "Mean validation score on selection rng seeds.")]
    seconds: Annotated[float, Column("s", "Time of the iteration.")]
    phase_ms: Annotated[dict[str, float], Column("ms", "Time by phase: rollout, update, evaluation.")]


class ResourceRow(Row, frozen=True, kw_only=True):
    """Table ``resource``: one row about every ten seconds: resource use of the process."""

    rss_mb: Annotated[float, Column("MB", "Largest resident memory so far.")]
    rows_written: Annotated[int, Column("count", "Rows written so far, all tables.")]
    writer_ms: Annotated[float, Column("ms", "Time spent in the writer so far.")]
    disk_free_mb: Annotated[float, Column("MB", "Free disk space.", low=limits.DISK_FREE_MB)]


TABLES: dict[str, type[Row]] = {
    "run": RunRow,
    "epoch": EpochRow,
    "seed": SeedRow,
    "transition": TransitionRow,
    "decision": DecisionRow,
    "episode": EpisodeRow,
    "counterfactual": CounterfactualRow,
    "alert": AlertRow,
    "update": UpdateRow,
    "resource": ResourceRow,
}
"""Row type of each telemetry table, by name of the table."""
SCHEMA_VERSION = 4

Detail = Literal["summary", "standard", "full"]
_SUMMARY: Final = frozenset({"run", "update", "episode", "transition", "alert", "resource"})
_STANDARD: Final = _SUMMARY | {"epoch", "decision"}
TABLES_OF_DETAIL: Final[Mapping[Detail, frozenset[str]]] = {
    "summary": _SUMMARY,
    "standard": _STANDARD,
    "full": _STANDARD | {"seed", "counterfactual"},
}
"""Telemetry tables that a run writes, by level of detail."""
