"""Rows of one environment, built of what it knows; nothing else in the engine knows telemetry's shape."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, NamedTuple

import numpy as np

from esper.leyline.factored_actions import BoolArray, IntArray
from esper.leyline.protocols import PolicyOutput
from esper.leyline.reports import freshness
from esper.leyline.rows import (
    AlertRow,
    CounterfactualRow,
    DecisionRow,
    EpisodeRow,
    EpochRow,
    Row,
    SeedRow,
    StageMove,
    TransitionRow,
    known,
)
from esper.leyline.signals import EnvFacts
from esper.leyline.slot_table import SlotTable
from esper.tolaria.actuator import Outcome
from esper.tolaria.counterfactual import Counterfactuals
from esper.tolaria.episode_report import EpisodeReport
from esper.tolaria.recovery import Intervention

PHASES: Final = ("act", "train", "measure", "rest")


class Place(NamedTuple):
    """Where a row belongs: the first columns of every row of an episode."""

    env: int
    episode: int
    attempt: int
    iteration: int | None
    epoch: int


class Reward(NamedTuple):
    """A reward and its terms, which sum to it."""

    total: float
    terms: Mapping[str, float]


def _columns(row: type[Row], place: Place, source: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of ``row`` that its place and ``source`` know by name; what is not finite is unknown."""
    known_here = {name: known(source[name]) for name in row.__struct_fields__ if name in source}
    return known_here | place._asdict()


class Decision(NamedTuple):
    """One decision and what came of it."""

    place: Place
    action: IntArray
    """Canonical, ``[8]``."""
    read: BoolArray
    forced: bool
    outcome: Outcome


def decision_row(
    decision: Decision, policy: PolicyOutput | None = None, reward: Reward | None = None
) -> DecisionRow:
    """The row of a decision; ``policy`` and ``reward`` where there are any."""
    return DecisionRow(
        **decision.place._asdict(),
        action=decision.action.tolist(),
        read=decision.read.tolist(),
        forced=decision.forced,
        succeeded=decision.outcome.succeeded,
        refused_by=decision.outcome.refused_by,
        failed_checks=list(decision.outcome.failed_checks),
        **({} if policy is None else known(policy._asdict())),
        reward=None if reward is None else known(reward.total),
        reward_terms=None if reward is None else known(dict(reward.terms)),
    )


def transition_rows(place: Place, moves: Sequence[StageMove], score: float | None) -> Iterator[TransitionRow]:
    """One row per stage move; ``score`` is the validation score last measured."""
    for move in moves:
        yield TransitionRow(
            **place._asdict(),
            slot=move.slot,
            seed=move.seed_id,
            blueprint=move.blueprint,
            from_stage=int(move.origin),
            to_stage=int(move.target),
            cause=move.cause,
            reason=move.reason,
            gate=move.verdict.gate if move.verdict else None,
            passed=list(move.verdict.passed) if move.verdict else [],
            score=score,
            contribution=known(move.contribution),
            age=move.age,
        )


def counterfactual_rows(
    place: Place, result: Counterfactuals, in_forward: BoolArray
) -> Iterator[CounterfactualRow]:
    """One row per configuration, if any seed was switched; ``in_forward [slot]`` are the seeds all on."""
    if not result.slots:
        return
    for configuration, score, loss in zip(result.configurations, result.scores, result.losses, strict=True):
        on = in_forward.copy()
        on[list(result.slots)] = configuration
        yield CounterfactualRow(**place._asdict(), on=on.tolist(), score=float(score), loss=float(loss))


def epoch_row(
    place: Place,
    facts: EnvFacts,
    seconds: Mapping[str, float],
    *,
    twin_score: float | None,
    learning_rate: float,
    skipped_batches: int,
    skipped_steps: int,
) -> EpochRow:
    """The row of an epoch; ``seconds`` are those of each phase of its step."""
    spans = {phase: 1000 * span for phase, span in seconds.items()}
    return EpochRow(
        **_columns(EpochRow, place, asdict(facts)),
        twin_score=twin_score,
        learning_rate=learning_rate,
        skipped_batches=skipped_batches,
        skipped_steps=skipped_steps,
        ms=sum(spans.values()),
        phase_ms=spans,
    )


def seed_rows(place: Place, table: SlotTable) -> Iterator[SeedRow]:
    """One row per occupied slot of a table of one environment."""
    for slot in np.flatnonzero(table.occupied[0]).tolist():
        values = {name: column[0, slot].item() for name, column in table.arrays().items()}
        yield SeedRow(
            **_columns(SeedRow, place, values),
            slot=slot,
            seed=values["seed_id"],
            freshness=freshness(values["epochs_since_measured"]),
            params=values["seed_params"],
        )


def alert_row(place: Place, intervention: Intervention) -> AlertRow:
    """What the governor found wrong, and what was done about it."""
    return AlertRow(
        **place._asdict(),
        rule=intervention.alarm.kind,
        event="raised",
        severity="error",
        scope=f"environment {place.env}",
        value=known(intervention.alarm.loss),
        limit=known(intervention.alarm.limit),
        hint=f"the governor {intervention.answer}",
    )


def episode_row(
    place: Place, report: EpisodeReport, *, twin_score: float | None, seconds: float, reward: Reward | None
) -> EpisodeRow:
    """The row of an episode, after its commit; ``reward`` is its undiscounted return."""
    return EpisodeRow(
        **_columns(EpisodeRow, place, asdict(report) | {"op_counts": list(report.op_counts)}),
        twin_val_score=twin_score,
        ended_by="governor" if report.cut_short else "horizon",
        seconds=seconds,
        total_reward=None if reward is None else known(reward.total),
        reward_terms=None if reward is None else known(dict(reward.terms)),
    )
