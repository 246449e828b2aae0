"""What happens in a run, as flat typed rows: the one vocabulary between engine, telemetry and views.

Rows are values: producers build one with all it says and hand it to the sink they were given; the writer
adds the time, as it encodes the row, and nobody changes it. Lists are indexed by the names stored in the
run's own row, so that more slots or heads never change a type. ``None`` means unknown and is never replaced
by 0.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec

from esper.leyline import thresholds
from esper.leyline.stages import Stage

Cause = Literal["policy", "mechanical", "governor", "user"]
MetricColumn = Literal["val_score", "val_loss"]
Severity = Literal["warning", "error"]
Terms = dict[str, float | None]
"""Of a reward, by name."""

UNIT_RANGES: Final = MappingProxyType({"fraction": (0.0, 1.0), "score": (0.0, 100.0)})
"""What a value of this unit cannot leave. Differences of scores are points and may be anything."""


@dataclass(frozen=True, slots=True)
class Column:
    """Meaning of a column: its unit, one sentence, and where its healthy values lie if anywhere."""

    unit: str
    meaning: str
    low: float | None = None
    high: float | None = None
    """Edges of the healthy band; None: open."""


class GateVerdict(NamedTuple):
    """What a gate looked at: the checks that passed and those that failed."""

    gate: str
    passed: tuple[str, ...]
    failed: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.failed


class StageMove(NamedTuple):
    """One stage change, as the lifecycle reports it."""

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
    """NaN while unknown."""


def known(value: Any) -> Any:
    """``value`` with ``None`` in the place of every number that is not finite, however deep."""
    if isinstance(value, dict):
        return {name: known(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [known(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Common to all tables."""

    t: Annotated[float, Column("s", "Seconds since the run began, stamped by the writer.")] = 0.0


class EnvRow(Row, frozen=True, kw_only=True):
    """Common to what happens within an episode."""

    env: Annotated[int, Column("index", "Environment within the run.")]
    episode: Annotated[int, Column("index", "Episode within the environment.")]
    attempt: Annotated[int, Column("index", "0, or how many breakdowns preceded it in this episode.")] = 0
    iteration: Annotated[int | None, Column("iteration", "Of a training, from 1; null: of none.")] = None
    epoch: Annotated[int, Column("epoch", "Host epochs finished so far; 0 is the untrained host.")]


class RunRow(Row, frozen=True, kw_only=True):
    """One per run: what was run, where, and the names that the other tables' indices refer to."""

    schema_version: Annotated[int, Column("version", "Raised when a column changes its meaning.")]
    name: Annotated[str, Column("name", "Name of the run, its directory's unless told otherwise.")]
    started: Annotated[str, Column("UTC", "Wall-clock time at which the run began, ISO 8601.")]
    task: Annotated[str, Column("name", "Task preset, or the class of a user's own network.")]
    controller: Annotated[str, Column("name", "Controller.")]
    rng_seed: Annotated[
        int | None, Column("seed", "Root of every random stream; null: the user's own program seeds them.")
    ]
    config: Annotated[dict[str, Any], Column("map", "The whole configuration.")]
    data_hash: Annotated[
        str | None, Column("hash", "Of the task's data, before it is split; null: the user's own.")
    ]
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
    horizon: Annotated[int | None, Column("epoch", "Epochs of a whole episode; null: a budget ends it.")]
    metric: Annotated[
        MetricColumn, Column("name", "What is decided by: the column of that name, and its differences.")
    ] = "val_score"
    iterations: Annotated[int | None, Column("iteration", "Of a training; null: nothing is trained here.")]
    envs: Annotated[int, Column("count", "Environments side by side.")]
    devices: Annotated[list[str], Column("names", "Device of each environment, in their order.")] = []


class EpochRow(EnvRow, frozen=True, kw_only=True):
    """One per environment and epoch."""

    train_loss: Annotated[float | None, Column("nats", "Mean training loss over the epoch.")]
    train_score: Annotated[float | None, Column("score", "Training score over the epoch, 0-100.")]
    val_loss: Annotated[float | None, Column("nats", "Validation loss after the epoch.")]
    val_score: Annotated[float | None, Column("score", "Validation score after the epoch, 0-100.")]
    twin_score: Annotated[float | None, Column("score", "Validation score of the do-nothing twin.")]
    params: Annotated[int, Column("count", "Parameters of host and seeds together.")]
    grown_params: Annotated[int, Column("count", "Parameters of the seeds.")]
    host_gradient_norm: Annotated[float | None, Column("norm", "Mean norm before clipping, host only.")]
    learning_rate: Annotated[float, Column("rate", "The host's learning rate at the end of the epoch.")]
    skipped_batches: Annotated[int, Column("count", "Minibatches left out as non-finite.")]
    skipped_steps: Annotated[
        int, Column("count", "Optimiser steps left out because a float16 gradient overflowed its scale.")
    ] = 0
    ms: Annotated[float, Column("ms", "Time of the whole step.")]
    phase_ms: Annotated[dict[str, float], Column("ms", "Of which act, train, measure and the rest.")]


class SeedRow(EnvRow, frozen=True, kw_only=True):
    """One per seed and epoch, from germination to removal."""

    slot: Annotated[int, Column("index", "Slot of the seed.")]
    seed: Annotated[int, Column("index", "Serial number of the seed within its episode.")]
    blueprint: Annotated[int, Column("index", "Blueprint of the seed.")]
    style: Annotated[int, Column("index", "Blend style.")]
    stage: Annotated[int, Column("index", "Stage after the epoch's mechanical moves.")]
    age: Annotated[int, Column("epoch", "Epochs since germination.")]
    alpha: Annotated[float, Column("fraction", "Blend weight for the epoch to come.")]
    contribution: Annotated[
        float | None, Column("points", "Score lost with this slot off, or loss gained by the run's metric.")
    ]
    contribution_error: Annotated[
        float | None, Column("points", "Standard error, paired per sample, in a user's run per batch.")
    ]
    shapley: Annotated[float | None, Column("points", "Exact or sampled Shapley value.")]
    interaction_sum: Annotated[float | None, Column("points", "Sum of pair interactions.")]
    freshness: Annotated[float, Column("fraction", "1 just measured, decaying; 0 never measured.")]
    gradient_norm: Annotated[float | None, Column("norm", "Gradient norm before clipping.")]
    gradient_health: Annotated[
        float | None, Column("fraction", "1 is healthy, 0 is not.", low=thresholds.MIN_GRADIENT_HEALTH)
    ]
    params: Annotated[int, Column("count", "Parameters of the seed.")]


class TransitionRow(EnvRow, frozen=True, kw_only=True):
    """One per stage change."""

    slot: Annotated[int, Column("index", "Slot of the seed.")]
    seed: Annotated[int, Column("index", "Serial number of the seed; -1 where the slot is empty.")]
    blueprint: Annotated[int, Column("index", "Blueprint; -1 where the slot is empty.")]
    from_stage: Annotated[int, Column("index", "Stage before.")]
    to_stage: Annotated[int, Column("index", "Stage after.")]
    cause: Annotated[Cause, Column("name", "Who caused it: policy, mechanical, governor or user.")]
    reason: Annotated[str, Column("text", "Why, in a few words.")]
    gate: Annotated[str | None, Column("name", "Gate that let it pass, if it has one.")]
    passed: Annotated[list[str], Column("names", "Checks of the gate that passed.")]
    score: Annotated[float | None, Column("score", "Validation score last measured.")]
    contribution: Annotated[float | None, Column("points", "Contribution last measured.")]
    age: Annotated[int, Column("epoch", "Epochs since germination.")]


class DecisionRow(EnvRow, frozen=True, kw_only=True):
    """One per environment and step: what was chosen before the epoch, and whether it came about.

    What only a policy knows is null for every other controller, and rewards are known in trainings.
    """

    action: Annotated[list[int], Column("indices", "The eight heads, unread ones canonical.")]
    read: Annotated[list[bool], Column("flags", "Which heads the op read.")]
    forced: Annotated[bool, Column("flag", "Nothing but WAIT was legal.")]
    succeeded: Annotated[bool, Column("flag", "The action came about.")]
    refused_by: Annotated[str | None, Column("name", "Gate, or 'legality', that refused it.")]
    failed_checks: Annotated[list[str], Column("names", "Checks that failed.")]
    masked: Annotated[list[bool] | None, Column("flags", "Per head, if a choice was masked off.")] = None
    log_probs: Annotated[list[float | None] | None, Column("nats", "Per head, of what was chosen.")] = None
    op_probs: Annotated[list[float | None] | None, Column("fraction", "Of every op, masked ones 0.")] = None
    value: Annotated[float | None, Column("reward", "What the critic expected from here on.")] = None
    reward: Annotated[float | None, Column("reward", "Reward of the decision.")] = None
    reward_terms: Annotated[Terms | None, Column("reward", "The reward, term by term.")] = None


class CounterfactualRow(EnvRow, frozen=True, kw_only=True):
    """One per on/off configuration that was scored."""

    on: Annotated[list[bool], Column("flags", "Which slots were on, in slot order.")]
    score: Annotated[float | None, Column("score", "Validation score of this configuration.")]
    loss: Annotated[float, Column("nats", "Validation loss of this configuration.")]


class AlertRow(Row, frozen=True, kw_only=True):
    """One per rule that was raised, or cleared again, and per intervention of the governor."""

    rule: Annotated[str, Column("name", "What is wrong, by the name of its rule.")]
    event: Annotated[Literal["raised", "cleared"], Column("name", "Raised or cleared.")]
    severity: Annotated[Severity, Column("name", "warning or error.")]
    scope: Annotated[str, Column("text", "What it is about, such as a head, a slot or the whole run.")]
    value: Annotated[float | None, Column("any", "What was found; null: it is not finite, or no number.")]
    limit: Annotated[float | None, Column("any", "What it must not pass; null: it must be finite.")]
    hint: Annotated[str, Column("text", "What to do, or what was done about it.")]
    env: Annotated[int | None, Column("index", "Environment; null: not of one.")] = None
    episode: Annotated[int | None, Column("index", "Episode; null: not of one.")] = None
    attempt: Annotated[int | None, Column("index", "Attempt at the episode; null: not of one.")] = None
    epoch: Annotated[int | None, Column("epoch", "Host epochs finished; null: not within an episode.")] = None
    iteration: Annotated[int | None, Column("iteration", "Iteration of a training; null: not of one.")] = None


class EpisodeRow(EnvRow, frozen=True, kw_only=True):
    """One per episode, written after the horizon's commit."""

    val_score: Annotated[float | None, Column("score", "Validation score of the committed network.")]
    val_loss: Annotated[float | None, Column("nats", "Validation loss of the committed network.")] = None
    test_score: Annotated[float | None, Column("score", "Test score of the committed network, read once.")]
    twin_val_score: Annotated[float | None, Column("score", "The twin's final validation score.")]
    best_val_score: Annotated[float | None, Column("score", "Best validation score on the way.")]
    host_params: Annotated[int, Column("count", "Parameters of the bare host.")]
    params: Annotated[int, Column("count", "Parameters of the committed network.")]
    host_flops_per_sample: Annotated[int, Column("FLOP", "One forward pass of the bare host.")]
    flops_per_sample: Annotated[int, Column("FLOP", "One forward pass of the committed network.")]
    flops: Annotated[dict[str, int], Column("FLOP", "Counted compute of the whole episode by purpose.")]
    op_counts: Annotated[list[int], Column("count", "How often each op was chosen.")]
    refused: Annotated[int, Column("count", "Actions that did not come about.")]
    rollbacks: Annotated[int, Column("count", "Returns to an earlier state.")]
    ended_by: Annotated[str, Column("name", "Why the episode ended: horizon, budget, or governor.")]
    seconds: Annotated[float, Column("s", "Time of the whole episode.")]
    total_reward: Annotated[float | None, Column("reward", "Undiscounted return; null: no rewards.")] = None
    reward_terms: Annotated[Terms | None, Column("reward", "The return, term by term.")] = None


class UpdateRow(Row, frozen=True, kw_only=True):
    """One per iteration of training: the episodes it collected and what the policy learned from them.

    A number that is not finite is null.
    """

    iteration: Annotated[int, Column("iteration", "Iterations finished, this one included.")]
    mean_return: Annotated[float | None, Column("reward", "Mean undiscounted return of the environments.")]
    reward_terms: Annotated[Terms, Column("reward", "Mean return, term by term.")]
    reward_variance: Annotated[float | None, Column("reward²", "Of single rewards over all decisions.")]
    reward_variance_unpaired: Annotated[float | None, Column("reward²", "Without the twin; null: no twin.")]
    val_score: Annotated[float | None, Column("score", "Mean validation score of the committed networks.")]
    params: Annotated[float | None, Column("count", "Mean parameters of the committed networks.")]
    broken_episodes: Annotated[int, Column("count", "Episodes that a breakdown of their host ended.", high=0)]
    op_shares: Annotated[list[float], Column("fraction", "Share of each op among all decisions.")]
    policy_loss: Annotated[float | None, Column("loss", "Clipped surrogate, last update epoch.")]
    value_loss: Annotated[float | None, Column("loss", "Half the squared error, last update epoch.")]
    entropy: Annotated[float | None, Column("bonus", "Weighted entropy of the heads that had a choice.")]
    head_entropy: Annotated[
        list[float | None],
        Column("fraction", "Per head, 1: uniform; null: never read.", low=thresholds.HEAD_ENTROPY_COLLAPSED),
    ]
    explained_variance: Annotated[float | None, Column("ratio", "Of the returns by the critic.", low=0.3)]
    value_nrmse: Annotated[
        float | None,
        Column("ratio", "Critic's error over the spread of returns.", high=thresholds.VALUE_NRMSE),
    ]
    value_return_correlation: Annotated[float | None, Column("correlation", "Of values and returns.")]
    approx_kl: Annotated[
        float | None,
        Column(
            "nats", "KL from the rollout's policy.", high=thresholds.KL_HIGH * thresholds.DEFAULT_TARGET_KL
        ),
    ]
    clip_fraction: Annotated[
        float, Column("fraction", "Rows with a choice whose ratio was clipped.", high=thresholds.CLIP_SHARE)
    ]
    ratio_mean: Annotated[float | None, Column("ratio", "New over old probability, mean.")]
    ratio_std: Annotated[float | None, Column("ratio", "New over old probability, standard deviation.")]
    ratio_max: Annotated[
        float | None, Column("ratio", "New over old, largest.", high=thresholds.RATIO_RANGE[1])
    ]
    ratio_min: Annotated[
        float | None, Column("ratio", "New over old, smallest.", low=thresholds.RATIO_RANGE[0])
    ]
    first_ratio_error: Annotated[
        float | None, Column("ratio", "Largest distance from 1, first update epoch.", high=1e-4)
    ]
    update_epochs: Annotated[int, Column("count", "Update epochs completed: steps of the optimiser.")]
    early_stop_update_epoch: Annotated[
        int | None, Column("update epoch", "Update epoch that the KL divergence stopped; null: none.")
    ]
    grad_norm: Annotated[
        float,
        Column("norm", "Before clipping, last update epoch.", high=thresholds.POLICY_GRADIENT_EXPLODING),
    ]
    head_grad_norm: Annotated[list[float | None], Column("norm", "Per head, first update epoch.")]
    forced_share: Annotated[
        float, Column("fraction", "Rows without any choice.", high=thresholds.FORCED_SHARE)
    ]
    skipped: Annotated[str | None, Column("text", "Why the update was left out; null: it was not.")]
    explosion: Annotated[dict[str, Any] | None, Column("map", "Decision whose ratio left its range.")]
    evaluation_return: Annotated[float | None, Column("reward", "Argmax episodes on selection rng seeds.")]
    evaluation_score: Annotated[float | None, Column("score", "Their validation score.")]
    seconds: Annotated[float, Column("s", "Time of the iteration.")]
    phase_ms: Annotated[dict[str, float], Column("ms", "Of which rollout, update and evaluation.")]


class ResourceRow(Row, frozen=True, kw_only=True):
    """About every ten seconds."""

    rss_mb: Annotated[float, Column("MB", "Largest resident memory so far.")]
    rows_written: Annotated[int, Column("count", "Rows written so far, all tables.")]
    writer_ms: Annotated[float, Column("ms", "Time spent in the writer so far.")]
    disk_free_mb: Annotated[float, Column("MB", "Room left for the run.", low=thresholds.DISK_FREE_MB)]


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
"""Every table by name, which is also the file's. They are written in this order."""
SCHEMA_VERSION = 4

Detail = Literal["summary", "standard", "full"]
_SUMMARY: Final = frozenset({"run", "update", "episode", "transition", "alert", "resource"})
_STANDARD: Final = _SUMMARY | {"epoch", "decision"}
TABLES_OF_DETAIL: Final[Mapping[Detail, frozenset[str]]] = MappingProxyType(
    {"summary": _SUMMARY, "standard": _STANDARD, "full": _STANDARD | {"seed", "counterfactual"}}
)
"""The tables that a run writes at each level of detail."""
