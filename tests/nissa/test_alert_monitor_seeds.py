"""Alert rules about seeds and the governor, on telemetry rows made by hand."""

from collections.abc import Iterable
from typing import Any

import pytest
from msgspec.structs import replace

from esper.leyline.rows import AlertRow, EpisodeRow, Row, SeedRow, UpdateRow
from esper.leyline.stages import Stage
from esper.nissa.alert_monitor import AlertMonitor
from tests.karn import fake_run
from tests.nissa.record import replay
from tests.nissa.test_alert_monitor import alerts_of, entropies, episode, run_row, seed, shares, update
from tests.rows import change

# --- seeds ------------------------------------------------------------------------------------------

HERE = "environment 3 slot r0c1"


@pytest.mark.parametrize(("health", "found"), [(0.7, []), (0.69, [(2, "raised", "dead-seed", HERE)])])
@pytest.mark.parametrize("stage", [Stage.TRAINING, Stage.BLENDING, Stage.HOLDING])
def test_dead_seed_alert_is_raised_after_two_epochs_of_low_gradient_health(
    stage: Stage, health: float, found: list[tuple[int, str, str, str]]
) -> None:
    rows = [seed(epoch, stage=stage, gradient_health=health) for epoch in (4, 5, 6)]
    assert alerts_of(AlertMonitor(run_row()), rows) == found


def test_dead_seed_alert_is_never_raised_for_a_fossilized_seed() -> None:
    rows = [seed(epoch, stage=Stage.HOLDING, gradient_health=0.0) for epoch in (4, 5)]
    fossils = [seed(epoch, stage=Stage.FOSSILIZED, gradient_health=0.0) for epoch in (6, 7, 8)]
    assert alerts_of(AlertMonitor(run_row()), [*rows, *fossils]) == [
        (2, "raised", "dead-seed", HERE),
        (3, "cleared", "dead-seed", HERE),
    ]


@pytest.mark.parametrize(
    ("changes", "raised"),
    [
        # A negative contribution within 1.96 standard errors of zero raises no alert.
        ({"contribution": -1.95}, None),
        ({"contribution": -1.97}, 2),
        # For a BLENDING seed, alpha is known to be constant from the second epoch on.
        ({"stage": Stage.BLENDING}, 3),
        # A FOSSILIZED seed cannot be pruned any more.
        ({"stage": Stage.FOSSILIZED}, None),
        ({"freshness": 0.99}, None),
        ({"contribution_error": None}, None),
    ],
)
def test_harmful_seed_alert_needs_a_prunable_seed_and_a_fresh_contribution(
    changes: dict[str, Any], raised: int | None
) -> None:
    rows = [seed(epoch, **{"contribution": -9.0, **changes}) for epoch in (4, 5, 6)]
    expected = [] if raised is None else [(raised, "raised", "harmful-seed", HERE)]
    assert alerts_of(AlertMonitor(run_row(iterations=None)), rows) == expected
    assert alerts_of(AlertMonitor(run_row(iterations=20)), rows) == [], (
        "a policy in training may hold harmful seeds"
    )


def test_harmful_seed_alert_needs_two_epochs_of_the_same_seed_at_constant_alpha() -> None:
    harm = {"contribution": -9.0, "stage": Stage.BLENDING}
    moving = [seed(epoch, alpha=0.1 * epoch, **harm) for epoch in (4, 5, 6)]
    assert alerts_of(AlertMonitor(run_row(iterations=None)), moving) == []
    rows = [seed(epoch, seed=number, alpha=0.5, **harm) for epoch, number in ((4, 1), (5, 2), (6, 2), (7, 2))]
    assert alerts_of(AlertMonitor(run_row(iterations=None)), rows) == [(4, "raised", "harmful-seed", HERE)]


def test_seed_alerts_distinguish_slots_and_environments() -> None:
    sick = {"stage": Stage.TRAINING, "gradient_health": 0.5}
    rows = [seed(4, **sick), seed(4, slot=2, **sick), seed(4, env=0, **sick), seed(5, slot=2, **sick)]
    assert alerts_of(AlertMonitor(run_row()), rows) == [(4, "raised", "dead-seed", "environment 3 slot r0c2")]


def dying(epochs: Iterable[int], **changes: Any) -> list[SeedRow]:
    return [seed(epoch, stage=Stage.TRAINING, gradient_health=0.5, **changes) for epoch in epochs]


def test_alert_of_a_seed_is_cleared_when_the_seed_is_removed() -> None:
    gone = replace(fake_run.transition_row(6, 1, Stage.TRAINING, Stage.PRUNED, "policy", ""), env=3, slot=1)
    monitor = AlertMonitor(run_row())
    elsewhere = replace(gone, env=2)
    next_door = replace(gone, slot=2)
    onwards = replace(gone, to_stage=int(Stage.BLENDING))
    assert alerts_of(monitor, [*dying((4, 5)), elsewhere, next_door, onwards, gone]) == [
        (2, "raised", "dead-seed", HERE),
        (6, "cleared", "dead-seed", HERE),
    ]
    assert alerts_of(monitor, dying((8,), seed=9)) == [], "its successor starts over"


def test_alert_of_a_seed_is_cleared_when_its_episode_ends() -> None:
    monitor = AlertMonitor(run_row())
    end = episode(0, env=3)
    [*_, cleared] = [alert for row in [*dying((4, 5)), end] for alert in monitor.take(row)]
    assert (cleared.event, cleared.rule, cleared.scope, cleared.value) == ("cleared", "dead-seed", HERE, None)
    assert (cleared.env, cleared.episode, cleared.epoch) == (3, 0, end.epoch)
    assert alerts_of(monitor, dying((1,), episode=1)) == []


# --- alerts of the governor -------------------------------------------------------------------------


def intervention(**changes: Any) -> AlertRow:
    return replace(
        fake_run.alert_row("divergence"), scope="environment 3", env=3, severity="error", **changes
    )


def test_alert_of_the_governor_is_not_repeated_and_is_cleared_when_its_episode_ends() -> None:
    monitor = AlertMonitor(run_row())
    pruned = fake_run.transition_row(6, 1, Stage.TRAINING, Stage.PRUNED, "policy", "")
    assert monitor.take(intervention()) == []
    assert monitor.take(episode(0, env=2)) == []
    assert monitor.take(replace(pruned, env=3)) == [], "it outlives a seed"
    [cleared] = monitor.take(episode(0, env=3, rollbacks=1))
    assert (cleared.event, cleared.rule, cleared.scope) == ("cleared", "divergence", "environment 3")
    assert monitor.take(episode(1, env=3)) == []


# --- replay -----------------------------------------------------------------------------------------


def eventful_iteration(number: int) -> list[Row]:
    """Return two episode rows and an update row, whose metrics raise different alerts in each iteration."""
    sign = -1 if 10 <= number < 30 else 1
    ended: list[Row] = [
        episode(number, env=env, val_score=30.0 + (7 * number + 3 * env) % 20, total_reward=0.0)
        for env in (0, 1)
    ]
    for row in ended:
        assert isinstance(row, EpisodeRow)
        change(row, total_reward=sign * row.val_score)
    wrong = {
        "approx_kl": 0.3 if number % 5 == 0 else 0.01,
        "value_nrmse": 2.0 if number % 16 > 4 else 0.5,
        "head_entropy": entropies(tempo=0.05 if number % 9 > 3 else 0.7),
        "op_shares": shares(0.99 if number % 11 > 4 else 0.5),
        "phase_ms": {"rollout": 20.0 if number % 13 > 6 else 10.0},
    }
    return [*ended, update(number, mean_return=0.1, **wrong)]


def test_alert_monitor_of_a_resumed_run_raises_the_alerts_of_an_uninterrupted_run() -> None:
    iterations = [eventful_iteration(number) for number in range(1, 41)]
    whole = AlertMonitor(run_row())
    expected = [whole.take(row) for rows in iterations for row in rows]
    assert {alert.rule for alerts in expected for alert in alerts} == {
        *("kl-runaway", "value-error", "head-collapse", "idle", "slow", "pays-for-worse")
    }
    for stop in (3, 14, 27):
        resumed = AlertMonitor(run_row())
        earlier = [row for rows in iterations[:stop] for row in rows]
        # A resumed run reads its earlier telemetry rows table by table.
        for kind in (EpisodeRow, UpdateRow):
            for row in earlier:
                if isinstance(row, kind):
                    resumed.take(row)
        assert [resumed.take(row) for rows in iterations[stop:] for row in rows] == expected[len(earlier) :]


def test_replayed_telemetry_rows_raise_the_same_alerts_with_or_without_recorded_alert_rows() -> None:
    monitor = AlertMonitor(run_row())
    bare: list[Row] = [run_row(), *dying((4, 5)), intervention(), episode(0, env=3), update(1, approx_kl=1.0)]
    # No alert is open at the end of the second episode.
    bare.append(episode(1, env=3))
    recorded = [found for row in bare for found in (row, *monitor.take(row))]
    assert [(alert.event, alert.rule) for alert in replay(bare)] == [
        ("raised", "dead-seed"),
        ("raised", "divergence"),
        ("cleared", "dead-seed"),
        ("cleared", "divergence"),
        ("raised", "kl-runaway"),
    ]
    assert replay(recorded) == replay(bare)
