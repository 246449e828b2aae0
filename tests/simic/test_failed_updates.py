"""Tests: exploding ratios or non-finite numbers in a policy update are reported, and the run continues."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from esper.karn.run import read_rows
from esper.leyline import HEAD_NAMES, EpochFacts
from esper.leyline.rows import AlertRow, DecisionRow, SeedRow, UpdateRow
from esper.leyline.thresholds import DETAIL_ITERATIONS
from esper.run.checkpoint_file import read_checkpoint
from esper.run.policy_training import task_of, train
from esper.run.run_config import TrainingConfig
from esper.simic.agent.ppo import PolicyDivergedError, PPOAgent, UpdateMetrics
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.training.policy_env import GrowthEnv
from esper.simic.training.trainer import Iteration, Trainer
from esper.tolaria.tasks import TASKS
from tests.tolaria.building import bits, stir, tiny_task

ENVS, STEPS = 3, 3


@pytest.fixture(autouse=True, scope="module")
def tiny_world() -> Iterator[None]:
    """Register a tiny task preset for the tests of this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, "tiny", tiny_task())
        yield


def config(**settings: Any) -> TrainingConfig:
    """Return a small training configuration, with which decision rows are written only after alerts."""
    few = {
        "envs": ENVS,
        "iterations": 2,
        "steps": STEPS,
        "hidden_dim": 16,
        "evaluate_episodes": 1,
        "update_epochs": 2,
    }
    return TrainingConfig(**{"task": "tiny", "detail": "summary", **few, **settings})


def raised(run: Path) -> list[tuple[str, int | None]]:
    return [(row.rule, row.iteration) for row in read_rows(run, AlertRow) if row.event == "raised"]


# --- ratio explosions -------------------------------------------------------------------------------


class Shaker:
    """Patch of ``PPOAgent.update`` that adds noise to the policy's weights during the updates ``shaken``."""

    def __init__(self, iterations: int, *shaken: int) -> None:
        self.rollouts: dict[int, TamiyoRolloutBuffer] = {}
        self.changes: dict[int, Tensor] = {}
        """By iteration: change of log-probabilities ``[env, step, head]`` that the noise in the weights
        causes."""
        update = PPOAgent.update

        def shaking(agent: PPOAgent, buffer: TamiyoRolloutBuffer, progress: float) -> UpdateMetrics:
            number = round(progress * iterations) + 1
            self.rollouts[number] = TamiyoRolloutBuffer.join([buffer])
            if number in shaken:
                before = [p.detach().clone() for p in agent.policy.parameters()]
                stir(agent.policy, scale=0.2)
                with torch.no_grad():
                    again = agent.policy.evaluate_actions(*buffer.get_batched_sequences())
                self.changes[number] = again.log_probs - buffer.log_probs
                metrics = update(agent, buffer, progress)
                with torch.no_grad():
                    for parameter, value in zip(agent.policy.parameters(), before, strict=True):
                        parameter.copy_(value)
                return metrics
            return update(agent, buffer, progress)

        self.update = shaking


def shaken_run(out: Path, iterations: int, *shaken: int, **settings: Any) -> Shaker:
    shaker = Shaker(iterations, *shaken)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PPOAgent, "update", shaker.update)
        train(config(iterations=iterations, **settings), out)
    return shaker


@pytest.fixture(scope="module")
def shaken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Shaker]:
    """Run six training iterations, of which the second raises an alert."""
    run = tmp_path_factory.mktemp("shaken") / "run"
    return run, shaken_run(run, 6, 2, checkpoint_every=1)


def test_exploding_probability_ratio_is_written_with_environment_step_head_and_action(
    shaken: tuple[Path, Shaker],
) -> None:
    run, shaker = shaken
    first, second, *_ = read_rows(run, UpdateRow)
    assert first.explosion is None
    assert ("kl-runaway", 2) in raised(run)
    found = second.explosion
    assert found is not None
    joint = shaker.changes[2].sum(dim=-1)
    env, step = divmod(int(joint.abs().argmax()), STEPS)
    head = int(shaker.changes[2][env, step].abs().argmax())
    assert (found["env"], found["step"], found["head"]) == (env, step, HEAD_NAMES[head])
    assert found["action"] == shaker.rollouts[2].actions[env, step, head].item()
    assert found["ratio"] == pytest.approx(joint[env, step].exp().item(), rel=1e-4)
    old = shaker.rollouts[2].log_probs[env, step, head].item()
    assert found["old_log_prob"] == pytest.approx(old)
    assert found["new_log_prob"] - old == pytest.approx(shaker.changes[2][env, step, head].item(), rel=1e-4)


def detail_of(rollouts: dict[int, TamiyoRolloutBuffer], iterations: range) -> list[dict[str, Any]]:
    return [
        {
            "iteration": number,
            "env": env,
            "step": step,
            "action": rollouts[number].actions[env, step].tolist(),
            "log_probs": rollouts[number].log_probs[env, step].tolist(),
            "value": rollouts[number].values[env, step].item(),
            "reward": rollouts[number].rewards[env, step].item(),
        }
        for number in iterations
        for env in range(len(rollouts[number].rewards))
        for step in range(STEPS)
    ]


def details(run: Path) -> list[dict[str, Any]]:
    return [
        {
            "iteration": row.episode + 1,
            "env": row.env,
            "step": row.epoch,
            **{name: getattr(row, name) for name in ("action", "log_probs", "value")},
            "reward": np.float32(row.reward).item(),  # Rollouts store rewards in float32.
        }
        for row in read_rows(run, DecisionRow)
    ]


def test_telemetry_of_iterations_after_an_alert_has_full_detail(shaken: tuple[Path, Shaker]) -> None:
    run, shaker = shaken
    assert DETAIL_ITERATIONS == 3
    assert {number for _, number in raised(run)} == {2}
    assert details(run) == detail_of(shaker.rollouts, range(2, 5))
    assert {row.episode + 1 for row in read_rows(run, SeedRow)} <= {2, 3, 4}
    [file] = (run / "diagnostics").iterdir()
    told = json.loads(file.read_text())
    assert "kl-runaway" in [alert["rule"] for alert in told["alerts"]]
    assert (file.name, told["UpdateRow"]["iteration"]) == ("iteration-00002.json", 2)


def test_second_alert_extends_the_number_of_iterations_with_full_telemetry_detail(tmp_path: Path) -> None:
    rollouts = shaken_run(tmp_path / "run", 6, 1, 3).rollouts
    assert details(tmp_path / "run") == detail_of(rollouts, range(1, 6))


def test_decision_rows_at_standard_detail_have_environment_indices_of_all_shards(tmp_path: Path) -> None:
    rollouts = shaken_run(tmp_path / "run", 1, envs=6, detail="standard").rollouts
    assert raised(tmp_path / "run") == []
    assert not (tmp_path / "run" / "diagnostics").exists()
    found = details(tmp_path / "run")
    assert [row["env"] for row in found] == [env for env in range(6) for _ in range(STEPS)]
    assert found == detail_of(rollouts, range(1, 2))


class StoppedError(Exception):
    """Error that a test raises to simulate the end of the process."""


def stop_after(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    run_iteration = Trainer.run_iteration

    def stopping(trainer: Trainer) -> Iteration:
        if trainer.iteration == number:
            raise StoppedError
        return run_iteration(trainer)

    monkeypatch.setattr(Trainer, "run_iteration", stopping)


@pytest.mark.parametrize("stopped_after", [2, 4])
def test_resumed_run_writes_the_same_decision_rows_after_an_alert(
    stopped_after: int, shaken: tuple[Path, Shaker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole, shaker = shaken
    monkeypatch.setattr(PPOAgent, "update", shaker.update)
    with monkeypatch.context() as patch:
        stop_after(patch, stopped_after)
        with pytest.raises(StoppedError):
            train(config(iterations=6, checkpoint_every=1), tmp_path)
    train(config(iterations=6, checkpoint_every=1), tmp_path, resume=True)
    assert details(tmp_path) == details(whole)
    assert len(details(whole)) == DETAIL_ITERATIONS * ENVS * STEPS


# --- non-finite numbers ------------------------------------------------------------------------------


def break_rewards(monkeypatch: pytest.MonkeyPatch, broken: Callable[[int], bool]) -> None:
    """Make one reward term of environment 1 NaN from step 2 on, in iterations where ``broken`` is true."""
    rewards = GrowthEnv._rewards

    def breaking(env: GrowthEnv, facts: EpochFacts) -> Any:
        reward = rewards(env, facts)
        if 1 in env.env_indices and broken(env._episode + 1):
            row = env.env_indices.index(1)
            if facts.epoch[row] > 1:
                env.reward_log.terms[-1]["lead"][row] = reward[row] = math.nan
        return reward

    monkeypatch.setattr(GrowthEnv, "_rewards", breaking)


def test_nan_reward_is_written_as_null_and_the_skipped_update_has_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    break_rewards(monkeypatch, lambda number: number == 2)
    train(config(iterations=3), tmp_path / "run")
    rows = read_rows(tmp_path / "run", UpdateRow)
    assert [row.skipped for row in rows] == [None, "reward of environment 1 at step 1 is nan", None]
    assert ("non-finite-update", 2) in raised(tmp_path / "run")
    assert (rows[1].mean_return, rows[1].reward_variance) == (None, None)
    assert rows[1].reward_terms["lead"] is None
    assert rows[1].reward_terms["rent"] is not None
    assert rows[2].mean_return is not None
    decisions = [row for row in read_rows(tmp_path / "run", DecisionRow) if row.episode == 1]
    assert [(row.env, row.epoch) for row in decisions if row.reward is None] == [(1, 1), (1, 2)]


def test_non_finite_probability_ratio_is_written_as_null(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    update = PPOAgent.update

    def breaking(agent: PPOAgent, buffer: TamiyoRolloutBuffer, progress: float) -> UpdateMetrics:
        buffer.log_probs[0, 1, 0] = -math.inf
        return update(agent, buffer, progress)

    monkeypatch.setattr(PPOAgent, "update", breaking)
    train(config(iterations=1), tmp_path / "run")
    [row] = read_rows(tmp_path / "run", UpdateRow)
    assert (row.ratio_max, row.approx_kl, row.first_ratio_error) == (None, None, None)
    assert row.explosion is not None
    assert (row.explosion["env"], row.explosion["step"], row.explosion["head"]) == (0, 1, "op")
    assert (row.explosion["ratio"], row.explosion["old_log_prob"]) == (None, None)
    assert row.skipped is not None
    assert "update epoch 0" in row.skipped


def test_three_non_finite_policy_updates_in_a_row_end_the_run_with_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as broken:
        break_rewards(broken, lambda number: number > 1)
        with pytest.raises(PolicyDivergedError, match="reward of environment 1 at step 1 is nan"):
            train(config(iterations=4), run)
    assert [row.skipped is None for row in read_rows(run, UpdateRow)] == [True, False, False]
    assert read_checkpoint(run)["iteration"] == 3
    train(config(iterations=4), run, resume=True)
    rows = read_rows(run, UpdateRow)
    assert [row.iteration for row in rows] == [1, 2, 3, 4]
    assert [row.skipped is None for row in rows] == [True, False, False, True]


def test_run_that_is_resumed_with_non_finite_updates_ends_at_once_and_can_be_resumed_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, settings = tmp_path / "run", config(iterations=3)
    untrained = bits(Trainer(task_of(settings), settings).policy.state_dict())
    with monkeypatch.context() as broken:
        break_rewards(broken, lambda number: True)
        for resume in (False, True):
            with pytest.raises(PolicyDivergedError):
                train(settings, run, resume=resume)
            assert bits(read_checkpoint(run)["policy"]) == untrained
    assert len(read_rows(run, UpdateRow)) == 2
    train(settings, run, resume=True)
    assert [row.iteration for row in read_rows(run, UpdateRow)] == [1, 2, 3]
