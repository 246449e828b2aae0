from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from esper.karn.questions.alerts import MOST_ENTRIES, Alerts, alerts
from esper.karn.run import open_run
from esper.leyline.rows import Row
from tests.karn import made_run
from tests.karn.made_run import alert_row
from tests.rows import change


def alerts_of(tmp_path: Path, rows: Sequence[Row], *, iterations: int | None = 20) -> Alerts:
    first = made_run.run_row(iterations=iterations, horizon=10)
    return alerts(open_run(made_run.write(tmp_path / "run", [first, *rows])))


def test_alert_lasts_from_the_iteration_that_raised_it_to_the_iteration_that_cleared_it(tmp_path):
    rows = [alert_row("kl", iteration=3), alert_row("kl", "cleared", iteration=7)]
    found = alerts_of(tmp_path / "cleared", rows)

    assert found.lines[0].spans == ((3, 7),)
    assert (found.entries[0].since, found.entries[0].until, found.open) == (3, 7, 0)
    found = alerts_of(tmp_path / "open", [*rows, alert_row("kl", iteration=9)])
    assert found.lines[0].spans == ((3, 7), (9, None))
    assert (found.entries[0].times, found.entries[0].since, found.entries[0].until) == (2, 3, None)
    assert found.open == 1


def test_alert_about_an_episode_ends_with_the_training_iteration_of_the_episode(tmp_path):
    found = alerts_of(tmp_path, [alert_row("collapse", env=2, episode=4, attempt=0, iteration=5, epoch=9)])

    assert found.lines[0].spans == ((5, 5),)
    assert found.open == 0


def test_alerts_of_one_rule_share_a_line_of_the_alert_chart_even_for_different_action_heads(tmp_path):
    rows = [
        alert_row("entropy", scope="op", iteration=2),
        alert_row("entropy", scope="slot", iteration=4),
        alert_row("entropy", "cleared", scope="op", iteration=6),
        alert_row("entropy", "cleared", scope="slot", iteration=9),
    ]
    found = alerts_of(tmp_path, rows)

    assert [(entry.scope, entry.since, entry.until) for entry in found.entries] == [
        ("slot", 4, 9),
        ("op", 2, 6),
    ]
    assert found.lines[0].spans == ((2, 9),)
    assert found.lines[0].times == 2


def test_alert_intervals_of_one_rule_are_merged_if_they_share_an_iteration_but_not_if_adjacent(tmp_path):
    rows = [
        alert_row("entropy", scope="op", iteration=2),
        alert_row("entropy", "cleared", scope="op", iteration=6),
        alert_row("entropy", scope="slot", iteration=6),
        alert_row("entropy", "cleared", scope="slot", iteration=9),
        alert_row("entropy", scope="style", iteration=10),
    ]

    assert alerts_of(tmp_path, rows).lines[0].spans == ((2, 9), (10, None))


def test_alerts_of_a_run_without_policy_training_are_plotted_by_epoch(tmp_path):
    found = alerts_of(tmp_path, [alert_row("collapse", env=0, episode=0, epoch=4)], iterations=None)

    assert (found.axis, found.lines[0].spans) == ("epoch", ((4, None),))


def test_alert_without_iteration_is_plotted_at_the_iteration_during_which_it_was_written(tmp_path):
    rows = made_run.training_rows(iterations=3, envs=1, horizon=2)
    found = alerts(open_run(made_run.write(tmp_path / "run", [*rows, alert_row("disk")])))

    assert found.lines[0].spans == ((3, None),)


def test_alert_rule_is_shown_with_the_worst_severity_of_its_alerts(tmp_path):
    mild, bad = alert_row("kl", iteration=1), alert_row("kl", iteration=2)
    change(bad, severity="error")

    assert alerts_of(tmp_path, [mild, bad]).lines[0].severity == "error"


def test_long_table_of_alerts_is_truncated_and_the_number_of_omitted_alerts_is_kept(tmp_path):
    rows = [alert_row("kl", scope=f"thing {index}", iteration=1) for index in range(MOST_ENTRIES + 7)]
    found = alerts_of(tmp_path, rows)

    assert (len(found.entries), found.left_out, found.lines[0].times) == (MOST_ENTRIES, 7, MOST_ENTRIES + 7)


def test_order_of_simultaneous_alerts_does_not_depend_on_the_order_of_their_rows(tmp_path):
    """Expect alerts sorted by rule, then by scope, each with the value of environment 2, the last to raise
    it."""
    rows = [
        replace(alert_row(rule, scope=scope, env=env, episode=0, iteration=1), value=float(env))
        for rule, scope in (("kl", "policy"), ("collapse", "twin"), ("collapse", "host"))
        for env in range(3)
    ]
    for place, written in enumerate((rows, rows[::-1])):
        rows = [made_run.run_row(iterations=20, horizon=10), *written]
        found = alerts(open_run(made_run.write(tmp_path / str(place), rows, tick=0.0)))
        assert [line.rule for line in found.lines] == ["collapse", "kl"]
        assert [(entry.rule, entry.scope, entry.value) for entry in found.entries] == [
            ("collapse", "host", 2.0),
            ("collapse", "twin", 2.0),
            ("kl", "policy", 2.0),
        ]
