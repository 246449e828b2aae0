"""Alert rules on real runs: good runs raise no alert, broken runs raise the expected alert within its delay.

Trainings that take minutes are recorded (``python -m tests.nissa.record``); short trainings run here.
"""

import math
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from esper.karn.run import read_rows
from esper.kasmina.governor import AlarmKind, Governor
from esper.leyline import thresholds as limits
from esper.leyline.factored_actions import OP_WAIT, BlueprintAction, BoolArray, LifecycleOp
from esper.leyline.rows import TABLES, AlertRow, EpisodeRow, Row, SeedRow, UpdateRow
from esper.leyline.slot_table import legal_slots_by_op
from esper.leyline.stages import Stage
from esper.nissa.alert_rules import GOVERNOR_RULES, MACHINE_RULES, RESULT_TERMS, RULES
from esper.nissa.writer import RunWriter
from esper.run.policy_training import train
from esper.run.row_sink import RowSink
from esper.simic.config import TrainingConfig
from esper.simic.rewards.families import FAMILIES
from esper.simic.training import trainer
from esper.simic.training.policy_env import GrowthEnv
from esper.simic.training.trainer import Iteration, Trainer
from esper.tamiyo.policy import action_masks
from esper.tolaria.tasks import TASKS
from tests.karn import fake_run
from tests.nissa import record
from tests.nissa.record import replay
from tests.tolaria.building import ListSink, MorphEnv, plant, run, started, tiny_task
from tools.make_reference import alerts_markdown

ROOT = Path(__file__).parents[2]
DELAY = {rule.name: rule.delay for rule in RULES}


@pytest.fixture(autouse=True)
def tiny_world(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Register the task "tiny"; all tests of this process share a cache of twin scores."""
    monkeypatch.setenv("ESPER_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setitem(TASKS, "tiny", tiny_task())


def rows_of_training(folder: Path, **settings: Any) -> list[Row]:
    """Run a short training and return all its telemetry rows, table by table."""
    few = {"envs": 2, "steps": 3, "hidden_dim": 16, "evaluate_episodes": 1, "evaluate_every": 100}
    config = TrainingConfig(**{"task": "tiny", "detail": "full", **few, **settings})
    train(config, folder / "run")
    return [row for kind in TABLES.values() for row in read_rows(folder / "run", kind)]


def raised(rows: Iterable[Row]) -> list[tuple[str, str]]:
    return [
        (row.rule, row.scope)
        for row in rows
        if isinstance(row, AlertRow) and row.event == "raised" and row.rule not in MACHINE_RULES
    ]


def iterations_of(rows: Iterable[Row], rule: str, event: str = "raised") -> list[int | None]:
    return [
        row.iteration for row in rows if isinstance(row, AlertRow) and row.rule == rule and row.event == event
    ]


# --- good runs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["good", "converged"])
def test_recorded_good_training_raises_no_alert(name: str) -> None:
    rows = list(record.read(name))
    assert raised(replay(rows)) == []


def test_recorded_good_trainings_contain_low_entropy_clipping_and_large_ratios() -> None:
    """Good trainings without low entropy, clipping and large ratios would not show that alert rules tolerate
    these."""
    updates = [row for row in record.read("converged") if isinstance(row, UpdateRow)]
    settled = [u for u in updates if min(e for e in u.head_entropy if e is not None) < 0.01]
    assert len(settled) > 20
    assert max(u.clip_fraction for u in updates) > 0.6
    assert sum(u.explosion is not None for u in updates) >= 5
    assert max(u.approx_kl or 0.0 for u in updates) > 1.9 * limits.DEFAULT_TARGET_KL
    episodes = [row for row in record.read("good") if isinstance(row, EpisodeRow)]
    assert len(episodes) >= 90
    assert all(episode.total_reward is not None for episode in episodes)


def test_episode_with_healthy_seeds_raises_no_alert() -> None:
    env, sink = started(tiny_task((8, 8, 8), kernel=3, horizon=10, batches_per_epoch=6))
    run(env, {0: plant(1), 2: plant(0)})
    env.finish()
    assert len(sink.of(SeedRow)) > 10
    assert replay([fake_run.run_row(), *sink.rows]) == []


# --- broken trainings -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "scope", "wrong_since"),
    [
        ("ratio", "run", 1),
        ("kl-runaway", "run", 1),
        ("kl", "run", 1),
        ("clip-share", "run", 1),
        ("gradient-jump", "run", 2),
        ("head-collapse", "head alpha_speed", 1),
        ("head-collapse", "head op", 2),
    ],
)
def test_training_with_a_far_too_large_learning_rate_raises_each_expected_alert_within_its_delay(
    rule: str, scope: str, wrong_since: int
) -> None:
    found = [
        alert for alert in replay(record.read("exploding")) if (alert.rule, alert.scope) == (rule, scope)
    ]
    assert found[0].event == "raised"
    assert found[0].iteration == wrong_since + DELAY[rule] - 1


@pytest.mark.parametrize(("name", "rule"), [("flipped", "pays-for-worse"), ("shaped", "shaping")])
def test_alert_on_a_sign_flipped_or_mostly_shaped_reward_is_raised_at_the_twentieth_episode(
    name: str, rule: str
) -> None:
    *earlier, last = list(record.read(name))[: 1 + DELAY[rule]]
    assert raised(replay(earlier)) == []
    assert (rule, "run") in raised(replay([*earlier, last]))


def test_alerts_raised_during_a_training_equal_the_alerts_of_a_replay_of_its_rows(tmp_path: Path) -> None:
    rows = rows_of_training(tmp_path, learning_rate=0.3, iterations=3)
    assert iterations_of(rows, "ratio")[0] == 1
    assert iterations_of(rows, "kl-runaway")[0] == 1

    def essence(alerts: Iterable[Row]) -> list[tuple[Any, ...]]:
        return [(a.event, a.rule, a.scope, a.value, a.iteration) for a in alerts if isinstance(a, AlertRow)]

    assert essence(replay(rows)) == essence(rows)


Rewards = NDArray[np.float64]


def change_rewards(monkeypatch: pytest.MonkeyPatch, change: Callable[[Rewards, int], Rewards]) -> None:
    """Replace the rewards of every step by ``change(rewards, iteration)``."""
    rewards = GrowthEnv._rewards

    def changed(env: GrowthEnv, *arguments: Any) -> Rewards:
        return change(rewards(env, *arguments), env._episode + 1)

    monkeypatch.setattr(GrowthEnv, "_rewards", changed)


def test_non_finite_or_extreme_reward_raises_an_alert_in_its_iteration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong = {2: math.nan, 3: 1e4}
    change_rewards(monkeypatch, lambda reward, iteration: reward + wrong.get(iteration, 0.0))
    rows = rows_of_training(tmp_path, iterations=3)
    assert iterations_of(rows, "non-finite-update") == [2]
    assert iterations_of(rows, "non-finite-update", "cleared") == [3]
    assert iterations_of(rows, "gradient-jump") == [3]


def test_policy_that_always_chooses_one_op_raises_a_head_collapse_alert_within_its_delay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stuck_since, run_iteration = 2, Trainer.run_iteration

    def stick(trainer: Trainer) -> Iteration:
        if trainer.iteration == stuck_since - 1:
            *_, last = (m for m in trainer.policy.heads["op"].modules() if isinstance(m, torch.nn.Linear))
            with torch.no_grad():
                last.bias[LifecycleOp.GERMINATE] += 1e4
        return run_iteration(trainer)

    monkeypatch.setattr(Trainer, "run_iteration", stick)
    rows = rows_of_training(tmp_path, iterations=4)
    assert ("head-collapse", "head op") in raised(rows)
    assert iterations_of(rows, "head-collapse")[0] == stuck_since + DELAY["head-collapse"] - 1


def test_alert_rules_idle_slow_and_value_error_raise_alerts_within_their_delays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Make WAIT the only legal op, and let the rollouts after the fifth take 1.5 times as long as the first
    five."""
    now, step = 0.0, GrowthEnv.step

    def only_wait(*arguments: Any) -> BoolArray:
        legal = legal_slots_by_op(*arguments)
        legal[:, np.arange(legal.shape[1]) != OP_WAIT] = False
        return legal

    def timed(env: GrowthEnv, *given: Any) -> Any:
        nonlocal now
        now += 1.0 if env._episode < limits.USUAL_ITERATIONS else 1.5
        return step(env, *given)

    monkeypatch.setattr(action_masks, "legal_slots_by_op", only_wait)
    monkeypatch.setattr(GrowthEnv, "step", timed)
    monkeypatch.setattr(trainer, "time", SimpleNamespace(perf_counter=lambda: now))
    change_rewards(monkeypatch, lambda reward, iteration: reward + 1)
    rows = rows_of_training(tmp_path, value_coefficient=0.0, envs=1, steps=2, iterations=10)
    for rule in ("forced-share", "idle", "value-error"):
        assert iterations_of(rows, rule) == [DELAY[rule]]
    assert iterations_of(rows, "slow") == [limits.USUAL_ITERATIONS + DELAY["slow"]]


def test_alert_on_a_nearly_full_disk_is_raised_at_the_next_resource_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    free, now = 1e9, 0.0
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    with RunWriter(tmp_path / "run", clock=lambda: now) as writer:
        telemetry = RowSink(fake_run.run_row(), writer)
        for free_mb in (501, 499, 400, 502):
            now, free = now + 20.0, free_mb * 1e6
            telemetry.emit(fake_run.epoch_row(1))
            writer.flush()
    written = read_rows(tmp_path / "run", AlertRow)
    assert [(row.rule, row.event, row.value, row.t) for row in written] == [
        ("disk-nearly-full", "raised", 499.0, 40.0),
        ("disk-nearly-full", "cleared", 502.0, 80.0),
    ]


# --- broken episodes --------------------------------------------------------------------------------


def alerts_of(sink: ListSink) -> list[AlertRow]:
    return replay([fake_run.run_row(), *sink.rows])


def test_seed_with_nan_weights_raises_only_the_alert_of_the_governor() -> None:
    env, sink = started(tiny_task(horizon=8))
    run(env, {0: plant(1)}, until=4)
    with torch.no_grad():
        env.model.seed_parameters(1)[0].fill_(math.nan)
    # The governor finds and prunes the non-finite seed in the fifth epoch.
    run(env, {})
    env.finish()
    first, last = alerts_of(sink)
    assert (first.rule, first.event, first.severity, first.epoch) == ("non-finite", "raised", "error", 4)
    assert (last.rule, last.event, last.scope) == ("non-finite", "cleared", first.scope)


def test_seed_with_vanishing_gradients_raises_the_dead_seed_alert_within_two_epochs() -> None:
    env, sink = started(tiny_task(horizon=8))
    run(env, {0: plant(1, BlueprintAction.NORM)}, until=2)
    with torch.no_grad():
        # The gradient of tanh vanishes for an input of 50.
        env.model.seed_parameters(1)[0].fill_(50.0)
    run(env, {}, until=5)
    [alert] = alerts_of(sink)
    assert (alert.rule, alert.scope) == ("dead-seed", "environment 0 slot r0c1")
    assert alert.epoch == 2 + DELAY["dead-seed"]


def stop_training(env: MorphEnv) -> None:
    env.host.train_minibatch = lambda *batch: None  # type: ignore[method-assign]


def test_seed_that_raises_the_loss_raises_the_harmful_seed_alert_within_two_epochs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The governor is disabled because it would remove the harmful seed.
    monkeypatch.setattr(Governor, "check", lambda governor, loss: None)
    env, sink = started(tiny_task((8, 8, 8), kernel=3, horizon=10, batches_per_epoch=12))
    run(env, {0: plant(1)}, until=6)
    assert env.table.stage[0, 1] == Stage.HOLDING
    stop_training(env)
    with torch.no_grad():
        for weight in env.model.seed_parameters(1):
            weight.copy_(torch.linspace(-8, 12, weight.numel()).view_as(weight))
    run(env, {}, until=9)
    [alert] = alerts_of(sink)
    assert (alert.rule, alert.epoch) == ("harmful-seed", 6 + DELAY["harmful-seed"])
    assert alert.value is not None
    assert alert.limit is not None
    assert alert.value < alert.limit < 0


# --- rule table -------------------------------------------------------------------------------------


def test_every_alert_rule_has_a_unique_name_and_a_hint() -> None:
    names = [rule.name for rule in RULES] + list(GOVERNOR_RULES)
    assert len(set(names)) == len(names)
    assert all(rule.hint.endswith(".") and rule.condition for rule in RULES)


def test_every_kind_of_alarm_of_the_governor_has_an_entry_in_governor_rules() -> None:
    assert set(GOVERNOR_RULES) == set(get_args(AlarmKind))


def test_churn_is_the_only_reward_term_that_counts_as_reward_shaping() -> None:
    terms = {"rollback"}.union(*(set(f.potentials) | set(f.costs) for f in FAMILIES.values()))
    assert terms - RESULT_TERMS == {"churn"}
    assert terms >= RESULT_TERMS


def test_alert_reference_in_the_documentation_equals_the_alert_rules() -> None:
    found = (ROOT / "docs" / "alerts.md").read_text(encoding="utf-8")
    assert found == alerts_markdown(), "run: python -m tools.make_reference"
    named = [line for line in found.splitlines() if line.startswith("| `")]
    assert len(named) == len(RULES) + len(GOVERNOR_RULES)
    assert named[2].startswith("| `kl` | warning | `update` | the divergence is above 2 times target_kl, 2")
    delays = {line.split(" | ")[4] for line in named[: len(RULES)]}
    assert delays >= {"within 1 update", "within 5 updates", "within 20 episodes", "within 2 epochs"}
