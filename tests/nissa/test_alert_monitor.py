"""Every alert rule, tested on telemetry rows made by hand with values just within and just beyond its
limit."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from esper.leyline.factored_actions import HEAD_NAMES
from esper.leyline.rows import AlertRow, EpisodeRow, Row, RunRow, SeedRow, UpdateRow
from esper.leyline.stages import Stage
from esper.nissa.alert_monitor import PASSED, AlertMonitor
from esper.nissa.alert_rules import RULES
from tests.karn import fake_run
from tests.rows import change

CONFIG = {"target_kl": 0.02, "reward_scale": 5.0}
BY_NAME = {rule.name: rule for rule in RULES}


def run_row(**changes: Any) -> RunRow:
    return replace(fake_run.run_row(iterations=20), config=CONFIG, **changes)


def update(number: int = 1, **changes: Any) -> UpdateRow:
    return replace(fake_run.update_row(number), **{"explosion": None, **changes})


def episode(number: int, **changes: Any) -> EpisodeRow:
    return replace(fake_run.episode_row(number), **changes)


def seed(epoch: int, **changes: Any) -> SeedRow:
    """Return a telemetry row of a seed in slot r0c1 with stage HOLDING and positive contribution."""
    healthy = {"epoch": epoch, "stage": Stage.HOLDING, "alpha": 1.0, "slot": 1, "env": 3}
    measured = {"contribution": 2.0, "contribution_error": 1.0, "freshness": 1.0, "gradient_health": 1.0}
    return replace(fake_run.seed_row(0, 4), **{**healthy, **measured, **changes})


def alerts_of(monitor: AlertMonitor, rows: Iterable[Row]) -> list[tuple[int, str, str, str]]:
    """Return (row number, event, rule, scope) for each alert that a monitor raises or clears for ``rows``."""
    return [
        (number, alert.event, alert.rule, alert.scope)
        for number, row in enumerate(rows, start=1)
        for alert in monitor.take(row)
    ]


def entropies(**heads: float | None) -> list[float | None]:
    return [heads.get(name, 0.8) for name in HEAD_NAMES]


def shares(wait: float) -> list[float]:
    return [wait, 1 - wait, 0.0, 0.0, 0.0, 0.0]


# --- thresholds of updates --------------------------------------------------------------------------

AT_THE_LIMIT: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("non-finite-update", {}, {"policy_loss": None}),
    ("non-finite-update", {}, {"value_loss": None}),
    ("non-finite-update", {}, {"entropy": None}),
    ("non-finite-update", {}, {"approx_kl": None}),
    ("non-finite-update", {}, {"skipped": "a reward is nan"}),
    ("ratio", {"ratio_max": 10.0}, {"ratio_max": 10.1}),
    ("ratio", {"ratio_min": 1e-6}, {"ratio_min": 0.9e-6}),
    ("ratio", {"explosion": {"ratio": 10.0}}, {"explosion": {"ratio": 10.1}}),
    ("ratio", {"explosion": {"ratio": 0.01}}, {"explosion": {"ratio": 0.0}}),
    ("ratio", {"explosion": {"ratio": 7.0}}, {"explosion": {"ratio": None}, "skipped": "pass 2"}),
    ("kl", {"approx_kl": 0.04}, {"approx_kl": 0.041}),
    ("kl-runaway", {"approx_kl": 0.1}, {"approx_kl": 0.101}),
    ("clip-share", {"clip_fraction": 0.75}, {"clip_fraction": 0.76}),
    ("head-collapse", {"head_entropy": entropies(tempo=0.1)}, {"head_entropy": entropies(tempo=0.099)}),
    ("value-error", {"value_nrmse": 1.0}, {"value_nrmse": 1.01}),
    ("forced-share", {"forced_share": 0.6}, {"forced_share": 0.61}),
    ("idle", {"op_shares": shares(0.95)}, {"op_shares": shares(0.96)}),
]


@pytest.mark.parametrize(("name", "good", "bad"), AT_THE_LIMIT)
def test_alert_on_a_ppo_update_is_raised_for_a_metric_beyond_its_limit_and_cleared_for_one_within_it(
    name: str, good: dict[str, Any], bad: dict[str, Any]
) -> None:
    times = BY_NAME[name].times
    monitor = AlertMonitor(run_row())
    turns = [good, *[bad] * (times - 1), good, *[bad] * (times + 2), good, good, *[bad] * times]
    seen = alerts_of(monitor, [update(number, **changes) for number, changes in enumerate(turns, start=1)])

    first = 1 + (times - 1) + 1 + times
    assert [(number, event) for number, event, rule, _ in seen if rule == name] == [
        (first, "raised"),
        (first + 3, "cleared"),
        (first + 4 + times, "raised"),
    ]


def test_every_alert_rule_needs_only_one_violation_or_computes_its_value_from_only_one_row() -> None:
    assert all(1 in (rule.times, rule.window) for rule in RULES), "else its delay would be their sum"


def test_alert_row_contains_severity_value_limit_iteration_and_hint() -> None:
    monitor = AlertMonitor(run_row())
    [raised] = monitor.take(update(7, approx_kl=None, skipped="pass 0: KL nan"))
    assert raised == AlertRow(
        rule="non-finite-update",
        event="raised",
        severity="error",
        scope="run",
        value=None,
        limit=None,
        hint=BY_NAME["non-finite-update"].hint,
        iteration=7,
    )
    monitor = AlertMonitor(run_row())
    [high] = [a for a in monitor.take(update(8, approx_kl=0.15)) if a.rule == "kl-runaway"]
    assert (high.severity, high.value, high.limit, high.iteration, high.env) == ("error", 0.15, 0.1, 8, None)
    [low] = [a for a in monitor.take(update(9, approx_kl=0.01)) if a.event == "cleared"]
    assert (low.rule, low.severity, low.value) == ("kl-runaway", "error", 0.01)
    assert (low.iteration, low.hint) == (9, PASSED)


def test_zero_metrics_of_a_skipped_ppo_update_raise_and_clear_no_alert() -> None:
    wrong = {"approx_kl": 1.0, "clip_fraction": 0.9, "forced_share": 0.9, "value_nrmse": 9.0}
    unmeasured = {"approx_kl": 0.0, "clip_fraction": 0.0, "forced_share": 0.0, "value_nrmse": 0.0}
    rows = [update(n, mean_return=0.1, **wrong) for n in range(1, 11)]
    rows += [update(11, skipped="reward is nan", head_entropy=[], **unmeasured)]
    rows += [update(12, mean_return=0.1, **wrong)]
    seen = [(number, event, rule) for number, event, rule, _ in alerts_of(AlertMonitor(run_row()), rows)]
    assert {rule for number, _, rule in seen if number <= 10} == {
        *("kl", "kl-runaway", "clip-share", "forced-share", "value-error")
    }
    assert [one for one in seen if one[0] > 10] == [
        (11, "raised", "non-finite-update"),
        (12, "cleared", "non-finite-update"),
    ]


def test_skipped_ppo_update_clears_no_metric_alert_and_is_ignored_when_later_updates_are_compared() -> None:
    left_out = {"skipped": "reward is nan", "head_entropy": [], "grad_norm": 0.0, "ratio_max": 1.0}
    rows = [
        update(1, **left_out),
        update(2, head_entropy=entropies(tempo=0.05)),
        update(3, ratio_max=50.0, grad_norm=1e6, head_entropy=entropies(tempo=0.05)),
        update(4, **left_out),
        update(5, ratio_max=50.0, head_entropy=entropies(tempo=0.05)),
    ]
    assert [(number, event, rule) for number, event, rule, _ in alerts_of(AlertMonitor(run_row()), rows)] == [
        (1, "raised", "non-finite-update"),
        (2, "cleared", "non-finite-update"),
        (3, "raised", "ratio"),
        (3, "raised", "gradient-jump"),
        (4, "raised", "non-finite-update"),
        (5, "cleared", "non-finite-update"),
        (5, "raised", "head-collapse"),
        (5, "cleared", "gradient-jump"),
    ]


# --- heads ------------------------------------------------------------------------------------------


def course(returns: Sequence[float], tempo: Sequence[float | None]) -> list[UpdateRow]:
    return [
        update(number, mean_return=value, head_entropy=entropies(tempo=entropy))
        for number, (value, entropy) in enumerate(zip(returns, tempo, strict=True), start=1)
    ]


SETTLING = [0.8, 0.6, 0.4, 0.2, 0.09, 0.05, 0.02]
RISING = [0.1, 0.3, 0.2, 0.6, 1.2, 1.8, 2.4]


@pytest.mark.parametrize(
    ("returns", "tempo", "raised"),
    [
        (RISING, SETTLING, None),
        # Low entropy of a head raises no alert if the return has risen, so that the mean of the last three
        # returns is above 0.35: the best of the first three returns (0.3) plus the reward of one point of
        # score (0.05).
        ([0.1, 0.3, 0.2, 0.2, 0.35, 0.35, 0.35], SETTLING, 7),
        ([0.1, 0.3, 0.2, 0.2, 0.36, 0.36, 0.36], SETTLING, None),
        # An abrupt drop of a head's entropy is reported even if the return rises.
        (RISING, [0.8, 0.8, 0.7, 0.51, 0.05, 0.05, 0.05], 7),
        (RISING, [0.8, 0.8, 0.7, 0.49, 0.05, 0.05, 0.05], None),
        # The head-collapse rule ignores updates in which a head has only one legal value.
        ([0.1] * 6, [0.8, 0.05, None, 0.05, None, 0.05], 6),
    ],
)
def test_head_collapse_alert_is_raised_if_entropy_drops_abruptly_or_without_higher_return(
    returns: list[float], tempo: list[float | None], raised: int | None
) -> None:
    expected = [] if raised is None else [(raised, "raised", "head-collapse", "head tempo")]
    assert alerts_of(AlertMonitor(run_row()), course(returns, tempo)) == expected


def test_alert_on_forced_decisions_is_not_raised_after_the_return_has_risen() -> None:
    returns = [0.1, 0.1, 0.1, 1.0, 1.0, 1.0, 1.0]
    rows = [update(n, mean_return=r, forced_share=0.9) for n, r in enumerate(returns, start=1)]
    assert alerts_of(AlertMonitor(run_row()), rows[3:] + rows[3:]) == [(3, "raised", "forced-share", "run")]
    assert (
        alerts_of(AlertMonitor(run_row()), [update(n, mean_return=0.1) for n in (1, 2, 3)] + rows[3:]) == []
    )


# --- comparison with earlier updates ----------------------------------------------------------------


def test_gradient_jump_alert_compares_the_norm_with_the_mean_of_earlier_updates() -> None:
    # In updates 2 to 4, the limit of the gradient norm is 100 times the mean norm of all earlier updates:
    # 100, 200 and 6800.
    norms = [1.0, 3.0, 200.0, 6801.0]
    rows = [update(number, grad_norm=norm) for number, norm in enumerate(norms, start=1)]
    assert alerts_of(AlertMonitor(run_row()), rows) == [(4, "raised", "gradient-jump", "run")]


def test_slow_rollout_alert_compares_the_time_with_the_median_of_earlier_iterations() -> None:
    # The median rollout time stays 7 ms, so a rollout is slow above 7 / 0.7 = 10 ms.
    spans = [*[7.0] * 20, 900.0, *[10.1] * 3, 9.9, *[10.1] * 5, 9.9]
    rows = [update(n, phase_ms={"rollout": span}) for n, span in enumerate(spans, start=1)]
    assert alerts_of(AlertMonitor(run_row()), rows) == [
        (30, "raised", "slow", "run"),
        (31, "cleared", "slow", "run"),
    ]


def test_slow_rollout_alert_is_not_raised_before_the_usual_rollout_time_is_known() -> None:
    # The usual rollout time is not known yet after four iterations.
    spans = [*[1.0] * 4, *[50.0] * 5]
    rows = [update(n, phase_ms={"rollout": span}) for n, span in enumerate(spans, start=1)]
    assert alerts_of(AlertMonitor(run_row()), rows) == []


# --- episodes ---------------------------------------------------------------------------------------


def episodes(pay: Callable[[int], float], count: int = 20, **changes: Any) -> list[EpisodeRow]:
    """Return episode rows in shuffled order; the higher an episode's gain over its twin's score, the lower
    its score."""
    leads = [7 * number % count for number in range(count)]
    return [
        episode(n, val_score=60.0 - lead, twin_val_score=60.0 - 2 * lead, total_reward=pay(lead), **changes)
        for n, lead in enumerate(leads)
    ]


def test_alert_on_higher_reward_for_worse_networks_is_raised_at_the_twentieth_episode() -> None:
    assert alerts_of(AlertMonitor(run_row()), episodes(lambda lead: -lead)) == [
        (20, "raised", "pays-for-worse", "run")
    ]
    assert alerts_of(AlertMonitor(run_row()), episodes(lambda lead: lead)) == []
    assert alerts_of(AlertMonitor(run_row()), episodes(lambda lead: 1.0)) == [], (
        "equal returns have no rank correlation"
    )
    assert alerts_of(AlertMonitor(run_row()), episodes(lambda lead: 1 - 1e-9 * lead)) == [], (
        "rounding differences have none either"
    )


def test_alert_on_higher_reward_for_worse_networks_is_raised_within_20_episodes_of_a_reward_flip() -> None:
    rows = [*episodes(lambda lead: lead), *episodes(lambda lead: -lead), *episodes(lambda lead: lead)]
    (raised, _, _, _), (cleared, event, _, _) = alerts_of(AlertMonitor(run_row()), rows)
    assert 20 < raised <= 40 < cleared <= 60
    assert event == "cleared"


def test_alert_on_higher_reward_for_worse_networks_uses_the_score_if_the_twin_score_is_unknown() -> None:
    monitor = AlertMonitor(run_row())
    # In these episodes, lower scores have higher rewards.
    rows = episodes(lambda lead: lead, iteration=7)
    found = [alert for row in rows for alert in monitor.take(replace(row, twin_val_score=None))]
    assert [(alert.rule, alert.iteration, alert.env) for alert in found] == [("pays-for-worse", 7, None)]


def test_alert_on_higher_reward_for_worse_networks_ignores_episodes_without_reward() -> None:
    unrewarded = [replace(row, total_reward=None) for row in episodes(lambda lead: -lead)]
    assert alerts_of(AlertMonitor(run_row()), unrewarded) == []
    mixed = [row for pair in zip(episodes(lambda lead: -lead), unrewarded, strict=True) for row in pair]
    assert alerts_of(AlertMonitor(run_row()), mixed) == [(39, "raised", "pays-for-worse", "run")], (
        "the 20th that was rewarded"
    )


@pytest.mark.parametrize(("churn", "expected"), [(-0.5, []), (-0.51, [(20, "raised", "shaping", "run")])])
def test_shaping_alert_is_raised_if_shaping_terms_exceed_half_of_the_sum_of_absolute_reward_terms(
    churn: float, expected: list[tuple[int, str, str, str]]
) -> None:
    rows = episodes(lambda lead: 1.0)
    for number, row in enumerate(rows):
        sign = 1 if number % 2 else -1
        change(row, reward_terms={"contribution": 0.4 * sign, "rent": -0.1, "rollback": None, "churn": churn})
    assert alerts_of(AlertMonitor(run_row()), rows) == expected
