"""Telemetry rows of a small policy training, computed by formula from the episodes of ``fake_run``.

Episode returns rise with the iteration and differ between environments. The troubled variant of the training
has metrics outside their normal range, unused action heads, a failed episode and alerts.
"""

from collections.abc import Iterator
from typing import Literal

from msgspec.structs import replace

from esper.leyline.rows import AlertRow, EnvRow, EpisodeRow, Row, RunRow, UpdateRow
from tests.karn import fake_run

ITERATIONS = 100
ENVS = 4


def run_row(*, iterations: int = ITERATIONS) -> RunRow:
    row = fake_run.run_row("teach", "ppo", iterations=iterations)
    return replace(row, envs=ENVS, config={**row.config, "target_kl": 0.03})


def episode_row(number: int, env: int) -> EpisodeRow:
    """Return an episode row; its return grows by 0.02 per iteration and by 0.1 per environment index."""
    return replace(
        fake_run.episode_row(number - 1),
        env=env,
        iteration=number,
        val_score=20 + 0.5 * number + env,
        twin_val_score=15.0 + env,
        total_reward=0.02 * number + 0.1 * env - 0.15,
        params=400 + 10 * number,
    )


def update_row(number: int) -> UpdateRow:
    is_evaluated = number % 10 == 0
    return replace(
        fake_run.update_row(number),
        mean_return=0.02 * number,
        val_score=21.5 + 0.5 * number,
        params=400.0 + 10 * number,
        approx_kl=0.005 + 0.0005 * number,
        explained_variance=0.9 - 0.005 * number,
        head_entropy=[max(1 - 0.01 * head * number, 0.0) for head in range(6)] + [None, None],
        op_shares=[0.5 + 0.002 * number, 0.25 - 0.002 * number, 0.0, 0.125, 0.125, 0.0],
        reward_terms={"lead": 0.03 * number, "rent": -0.01 * number, "rollback": 0.0},
        evaluation_return=0.03 * number if is_evaluated else None,
        evaluation_score=25.0 + number if is_evaluated else None,
    )


def troubled(row: UpdateRow) -> UpdateRow:
    """Return a PPO update row with metrics outside their normal range and with null values."""
    return replace(
        row,
        approx_kl=0.0812,
        clip_fraction=0.95,
        grad_norm=140.0,
        explained_variance=-0.25,
        value_nrmse=None,
        ratio_max=7.5,
        broken_episodes=1,
        forced_share=0.72,
        head_entropy=[*row.head_entropy[:4], 0.04, *row.head_entropy[5:]],
    )


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


def episode(number: int, env: int) -> Iterator[EnvRow]:
    """Yield the rows of a ``fake_run`` episode, with the given environment index and iteration ``number``."""
    for row in fake_run.episode(number - 1):
        assert isinstance(row, EnvRow)
        is_end = isinstance(row, EpisodeRow)
        yield episode_row(number, env) if is_end else replace(row, env=env, iteration=number)


def broken_episode(number: int, env: int) -> Iterator[EnvRow]:
    """Yield the rows of an episode that failed after three epochs, and the first rows of the next attempt."""
    yield from (row for row in episode(number, env) if row.epoch <= 3)
    end = episode_row(number, env)
    yield replace(end, epoch=3, ended_by="governor", val_score=9.5, total_reward=-0.5)
    for row in episode(number, env):
        if row.epoch <= 2:
            yield replace(row, attempt=1)


def iteration_rows(number: int) -> Iterator[Row]:
    """Yield all rows of one training iteration, in the order in which a training run writes rows."""
    for env in range(ENVS):
        yield from episode(number, env)
    yield update_row(number)


def ends_of_iteration(number: int) -> Iterator[Row]:
    """Yield only the episode rows and the update row of one training iteration."""
    for env in range(ENVS):
        yield episode_row(number, env)
    yield update_row(number)


def course(iterations: int) -> Iterator[Row]:
    """Yield the rows of a training of ``iterations`` iterations; per-epoch rows are only in the last."""
    yield run_row()
    for number in range(1, iterations):
        yield from ends_of_iteration(number)
    yield from iteration_rows(iterations)


def troubled_course(iterations: int) -> Iterator[Row]:
    """Yield the rows of a training whose last iteration has failed episodes, alerts, and metrics outside
    their normal range.
    """
    yield run_row()
    for number in range(1, iterations):
        yield from ends_of_iteration(number)
        if number == iterations - 3:
            yield alert_row("value-error", number, value=1.25)
    for env in range(ENVS):
        yield from episode(iterations, env) if env != 1 else broken_episode(iterations, env)
    yield replace(
        fake_run.alert_row(),
        severity="error",
        scope="environment 1",
        hint="the governor ended the episode",
        env=1,
        episode=iterations - 1,
        attempt=0,
        iteration=iterations,
        epoch=3,
    )
    yield troubled(update_row(iterations))
    yield alert_row("value-error", iterations, "cleared", value=0.75)
    yield alert_row("kl", iterations)
    yield alert_row("non-finite-update", iterations, value=None, severity="error")
