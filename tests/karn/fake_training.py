"""A small made-up training: iterations of episodes of ``fake_run``, worked out by formula rather than trained.

Returns rise from iteration to iteration and differ between environments; the last iteration has what a screen must
show well: numbers outside their bands, heads that were never read, an episode that broke down, and alerts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from esper.leyline.events import (
    AlertRow,
    EnvRow,
    EpisodeRow,
    Row,
    RunRow,
    SeedRow,
    TransitionRow,
    UpdateRow,
)
from tests.karn import fake_run

ITERATIONS = 100
ENVS = 4


def run_row(*, slots: int = 3, iterations: int = ITERATIONS, envs: int = ENVS) -> RunRow:
    row = fake_run.run_row("teach", "ppo", iterations=iterations)
    row.slots = [f"r0c{column}" for column in range(slots)]
    row.envs = envs
    row.config["target_kl"] = 0.03
    return row


def episode_row(number: int, env: int) -> EpisodeRow:
    """The end of an episode in iteration ``number``: 0.02 more return per iteration, 0.1 more per environment."""
    row = fake_run.episode_row(number - 1)
    row.env, row.iteration = env, number
    row.val_score, row.twin_val_score = 20 + 0.5 * number + env, 15.0 + env
    row.total_reward = 0.02 * number + 0.1 * env - 0.15
    row.params = 400 + 10 * number
    return row


def update_row(number: int) -> UpdateRow:
    row = fake_run.update_row(number)
    row.mean_return, row.val_score, row.params = 0.02 * number, 21.5 + 0.5 * number, 400.0 + 10 * number
    row.approx_kl, row.explained_variance = 0.005 + 0.0005 * number, 0.9 - 0.005 * number
    row.head_entropy = [max(1 - 0.01 * head * number, 0.0) for head in range(6)] + [None, None]
    row.op_shares = [0.5 + 0.002 * number, 0.25 - 0.002 * number, 0.0, 0.125, 0.125, 0.0]
    row.reward_terms = {"lead": 0.03 * number, "rent": -0.01 * number, "rollback": 0.0}
    if number % 10 == 0:
        row.evaluation_return, row.evaluation_score = 0.03 * number, 25.0 + number
    return row


def troubled(row: UpdateRow) -> UpdateRow:
    """The same iteration with numbers outside their bands and others that are unknown."""
    row.approx_kl, row.clip_fraction, row.grad_norm = 0.0812, 0.95, 140.0
    row.explained_variance, row.value_nrmse = -0.25, None
    row.ratio_max, row.broken_episodes, row.forced_share = 7.5, 1, 0.72
    row.head_entropy[4] = 0.04
    return row


def alert_row(
    rule: str,
    number: int,
    event: Literal["raised", "cleared"] = "raised",
    *,
    value: float | None = 0.0812,
    severity: Literal["warning", "error"] = "warning",
) -> AlertRow:
    return AlertRow(
        rule=rule,
        event=event,
        severity=severity,
        scope="policy",
        value=value,
        limit=None if value is None else 0.06,
        hint="Lower learning_rate.",
        iteration=number,
    )


def episode(number: int, env: int, *, slots: int = 3) -> Iterator[EnvRow]:
    """One episode of ``fake_run`` in an environment of iteration ``number``, as far as a host has its slots."""
    for row in fake_run.episode(number - 1):
        assert isinstance(row, EnvRow)
        if isinstance(row, EpisodeRow):
            yield episode_row(number, env)
        elif not isinstance(row, SeedRow | TransitionRow) or row.slot < slots:
            row.env, row.iteration = env, number
            yield row


def broken_episode(number: int, env: int) -> Iterator[EnvRow]:
    """An episode that broke down after three epochs, and the beginning of the one that followed it."""
    for row in episode(number, env):
        if row.epoch <= 3:
            yield row
    end = episode_row(number, env)
    end.epoch, end.ended_by, end.val_score, end.total_reward = 3, "governor", 9.5, -0.5
    yield end
    for row in episode(number, env):
        if row.epoch <= 2 and not isinstance(row, EpisodeRow):
            row.attempt = 1
            yield row


def without_seeds(rows: Iterable[Row]) -> Iterator[Row]:
    """What is written at the standard level of detail."""
    return (row for row in rows if not isinstance(row, SeedRow))


def iteration_rows(number: int, *, slots: int = 3) -> Iterator[Row]:
    """All rows of an iteration, as a training hands them over."""
    for env in range(ENVS):
        yield from episode(number, env, slots=slots)
    yield update_row(number)


def ends_of_iteration(number: int) -> Iterator[Row]:
    """An iteration as a summary keeps it."""
    for env in range(ENVS):
        yield episode_row(number, env)
    yield update_row(number)


def course(iterations: int, *, slots: int = 3, seeds: bool = True) -> Iterator[Row]:
    """A training after so many iterations; only the last one with its episodes."""
    yield run_row(slots=slots)
    for number in range(1, iterations):
        yield from ends_of_iteration(number)
    last = iteration_rows(iterations, slots=slots)
    yield from last if seeds else without_seeds(last)


def troubled_course(iterations: int, *, slots: int = 3) -> Iterator[Row]:
    """The same with trouble in the last iteration."""
    yield run_row(slots=slots)
    for number in range(1, iterations):
        yield from ends_of_iteration(number)
        if number == iterations - 3:
            yield alert_row("value-error", number, value=1.25)
    for env in range(ENVS):
        yield from episode(iterations, env) if env != 1 else broken_episode(iterations, env)
    collapse = fake_run.alert_row()
    collapse.severity, collapse.scope, collapse.hint = (
        "error",
        "environment 1",
        "the governor ended the episode",
    )
    collapse.env, collapse.episode, collapse.epoch = 1, iterations - 1, 3
    collapse.attempt, collapse.iteration = 0, iterations
    yield collapse
    yield troubled(update_row(iterations))
    yield alert_row("value-error", iterations, "cleared", value=0.75)
    yield alert_row("kl", iterations)
    yield alert_row("non-finite-update", iterations, value=None, severity="error")
