"""Rows of one environment, built from its state; nothing else in the engine knows telemetry's shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from esper.leyline.events import (
    AlertRow,
    CounterfactualRow,
    DecisionRow,
    EpisodeRow,
    EpochRow,
    SeedRow,
    StageMove,
    TransitionRow,
)
from esper.leyline.factored_actions import OP_WAIT, BoolArray, IntArray, heads_read
from esper.leyline.reports import freshness
from esper.leyline.signals import EnvFacts
from esper.tolaria.actuator import Outcome
from esper.tolaria.counterfactual import Counterfactuals
from esper.tolaria.epoch import EpochTraining
from esper.tolaria.governor import Alarm

if TYPE_CHECKING:
    from esper.tolaria.env import EpisodeReport, MorphEnv


def known(value: float) -> float | None:
    """``None`` for what was not measured."""
    return float(value) if math.isfinite(value) else None


def _place(env: MorphEnv) -> dict[str, Any]:
    """Where a row of the environment belongs."""
    return {
        "env": env.env,
        "episode": env.episode,
        "attempt": env.attempt,
        "iteration": env.iteration,
        "epoch": env.epoch,
    }


def emit_decision(
    env: MorphEnv, action: IntArray, alpha: NDArray[np.float64], legal: BoolArray, outcome: Outcome
) -> None:
    """The decision row of the coming epoch; ``action [1, 8]`` is canonical."""
    others = np.delete(legal[0].any(axis=1), OP_WAIT)
    policy_output = {} if env.policy_output is None else env.policy_output._asdict()
    env.sink.emit(
        DecisionRow(
            **_place(env),
            action=action[0].tolist(),
            read=heads_read(action, alpha)[0].tolist(),
            forced=not others.any(),
            succeeded=outcome.succeeded,
            refused_by=outcome.refused_by,
            failed_checks=list(outcome.failed_checks),
            **policy_output,
        )
    )


def emit_moves(env: MorphEnv, moves: Sequence[StageMove]) -> None:
    """One transition row per stage move."""
    for move in moves:
        env.sink.emit(
            TransitionRow(
                **_place(env),
                slot=move.slot,
                seed=move.seed_id,
                blueprint=move.blueprint,
                from_stage=int(move.origin),
                to_stage=int(move.target),
                cause=move.cause,
                reason=move.reason,
                gate=move.verdict.gate if move.verdict else None,
                passed=list(move.verdict.passed) if move.verdict else [],
                score=env.val_scores[-1] if env.val_scores else None,
                contribution=known(move.contribution),
                age=move.age,
            )
        )


def emit_counterfactuals(env: MorphEnv, result: Counterfactuals) -> None:
    """One row per configuration, if any seed was switched."""
    if not result.slots:
        return
    for configuration, score, loss in zip(result.configurations, result.scores, result.losses, strict=True):
        on = env.table.in_forward[0].copy()
        on[list(result.slots)] = configuration
        env.sink.emit(
            CounterfactualRow(
                **_place(env),
                on=on.tolist(),
                score=float(score),
                loss=float(loss),
            )
        )


PHASES: Final = ("act", "train", "measure", "rest")


def emit_epoch(env: MorphEnv, facts: EnvFacts, trained: EpochTraining, times: Sequence[float]) -> None:
    """The epoch row, and a seed row for every occupied slot.

    ``times`` are when the step began and when each of its phases ended, in seconds.
    """
    twin = env.twin_scores
    spans = [1000 * (end - start) for start, end in pairwise(times)]
    env.sink.emit(
        EpochRow(
            **_place(env),
            train_loss=known(facts.train_loss),
            train_score=known(facts.train_score),
            val_loss=facts.val_loss,
            val_score=facts.val_score,
            twin_score=None if twin is None else twin[facts.epoch],
            params=facts.params,
            grown_params=facts.grown_params,
            host_gradient_norm=known(facts.host_gradient_norm),
            learning_rate=env.learning_rate,
            skipped_batches=trained.skipped,
            ms=sum(spans),
            phase_ms=dict(zip(PHASES, spans, strict=True)),
        )
    )
    for slot in np.flatnonzero(env.table.occupied[0]).tolist():
        env.sink.emit(_seed_row(env, slot))


def _seed_row(env: MorphEnv, slot: int) -> SeedRow:
    table, at = env.table, (0, slot)
    return SeedRow(
        **_place(env),
        slot=slot,
        seed=int(table.seed_id[at]),
        blueprint=int(table.blueprint[at]),
        style=int(table.style[at]),
        stage=int(table.stage[at]),
        age=int(table.age[at]),
        alpha=float(table.alpha[at]),
        contribution=known(table.contribution[at]),
        contribution_error=known(table.contribution_error[at]),
        shapley=known(table.shapley[at]),
        interaction_sum=known(table.interaction_sum[at]),
        freshness=freshness(int(table.epochs_since_measured[at])),
        gradient_norm=known(table.gradient_norm[at]),
        gradient_health=known(table.gradient_health[at]),
        params=int(table.seed_params[at]),
    )


def emit_alert(env: MorphEnv, alarm: Alarm, answer: str) -> None:
    """What the governor found wrong, and what was done about it."""
    env.sink.emit(
        AlertRow(
            rule=alarm.kind,
            event="raised",
            severity="error",
            scope=f"environment {env.env}",
            value=known(alarm.loss),
            limit=known(alarm.limit),
            hint=f"the governor {answer}",
            **_place(env),
        )
    )


def emit_episode(env: MorphEnv, report: EpisodeReport, seconds: float) -> None:
    """The episode row, after the commit."""
    env.sink.emit(
        EpisodeRow(
            **_place(env),
            val_score=report.val_score,
            test_score=report.test_score,
            twin_val_score=None if env.twin_scores is None else env.twin_scores[env.epoch],
            best_val_score=report.best_val_score,
            host_params=report.host_params,
            params=report.params,
            host_flops_per_sample=report.host_flops_per_sample,
            flops_per_sample=report.flops_per_sample,
            flops=report.flops,
            op_counts=list(report.op_counts),
            refused=report.refused,
            rollbacks=report.rollbacks,
            ended_by="governor" if report.cut_short else "horizon",
            seconds=seconds,
        )
    )
