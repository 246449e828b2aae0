"""Telemetry rows of the episodes of a policy training."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from esper.karn.run import open_run, read_rows
from esper.leyline import HEAD_NAMES, OP_NAMES, Head
from esper.leyline.factored_actions import IntArray
from esper.leyline.rows import (
    TABLES,
    TABLES_OF_DETAIL,
    DecisionRow,
    Detail,
    EpisodeRow,
    EpochRow,
    RunRow,
    UpdateRow,
)
from esper.run.policy_training import train
from esper.run.run_config import TrainingConfig
from esper.tolaria.env import MorphEnv
from esper.tolaria.tasks import TASKS
from tests.tolaria.building import tiny_task

ENVS, STEPS, ITERATIONS = 4, 5, 2


@pytest.fixture(autouse=True)
def tiny_world(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("ESPER_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setitem(TASKS, "tiny", tiny_task())


def trained(out: Path, **settings: Any) -> Path:
    few = {"envs": ENVS, "iterations": ITERATIONS, "steps": STEPS, "hidden_dim": 16, "evaluate_episodes": 1}
    train(TrainingConfig(**{"task": "tiny", **few, **settings}), out)
    return out


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("recorded")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ESPER_CACHE", str(base / "cache"))
        patch.setitem(TASKS, "tiny", tiny_task())
        return trained(base / "run", detail="full")


def test_every_episode_has_decision_epoch_and_episode_rows(run: Path) -> None:
    episodes = [(env, number) for number in range(ITERATIONS) for env in range(ENVS)]
    assert [(row.env, row.episode) for row in read_rows(run, EpisodeRow)] == episodes
    for kind, first in ((DecisionRow, 0), (EpochRow, 1)):
        found = [(row.env, row.episode, row.epoch) for row in read_rows(run, kind)]
        assert found == [(*episode, epoch) for episode in episodes for epoch in range(first, STEPS + first)]


def assert_return_of_its_decisions(run: Path, episode: EpisodeRow) -> None:
    """Assert that the return in an episode row, and its terms, are sums over the episode's decision rows."""
    own = "env = ? AND episode = ? AND attempt = ?"
    decisions = open_run(run).rows(DecisionRow, own, [episode.env, episode.episode, episode.attempt])
    assert episode.total_reward == pytest.approx(sum(row.reward or 0.0 for row in decisions), abs=1e-5)
    assert episode.reward_terms is not None
    for term, amount in episode.reward_terms.items():
        expected = sum((row.reward_terms or {})[term] or 0.0 for row in decisions)
        assert amount == pytest.approx(expected, abs=1e-5)


def test_returns_in_rows_are_sums_of_rewards_and_rewards_are_sums_of_their_terms(run: Path) -> None:
    for row in read_rows(run, DecisionRow):
        assert row.reward_terms is not None
        assert sum(row.reward_terms.values()) == pytest.approx(row.reward, abs=1e-5)  # type: ignore[arg-type]
    episodes = read_rows(run, EpisodeRow)
    for episode in episodes:
        assert_return_of_its_decisions(run, episode)
    for update in read_rows(run, UpdateRow):
        of_iteration = [row.total_reward for row in episodes if row.episode == update.iteration - 1]
        assert update.mean_return == pytest.approx(np.mean(of_iteration), abs=1e-5)  # type: ignore[arg-type]


def test_return_of_a_second_attempt_excludes_rewards_of_the_diverged_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_step = MorphEnv.begin_step

    def fragile(env: MorphEnv, action: IntArray) -> None:
        place = env._key()
        if (place.env, place.attempt, place.epoch) in ((1, 0, 2), (1, 1, 1)):
            torch.nn.init.constant_(next(env.model.host.parameters()), math.nan)
        begin_step(env, action)

    monkeypatch.setattr(MorphEnv, "begin_step", fragile)
    run = trained(tmp_path / "run", iterations=1)
    episodes = [row for row in read_rows(run, EpisodeRow) if row.env == 1]
    assert [(row.episode, row.attempt, row.iteration) for row in episodes] == [(0, 0, 1), (0, 1, 1)]
    for episode in episodes:
        assert episode.total_reward
        assert_return_of_its_decisions(run, episode)


def test_decision_row_has_the_log_probability_of_its_action(run: Path) -> None:
    rows = read_rows(run, DecisionRow)
    for row in rows:
        assert row.op_probs is not None
        assert row.log_probs is not None
        assert sum(filter(None, row.op_probs)) == pytest.approx(1.0, abs=1e-5)
        chosen = row.op_probs[row.action[Head.OP]]
        assert np.log(chosen) == pytest.approx(row.log_probs[Head.OP], abs=1e-5)  # type: ignore[arg-type]
    assert any(row.masked is not None and not all(row.masked) for row in rows)


def test_run_row_has_the_names_of_all_values_of_every_head(run: Path) -> None:
    [row] = read_rows(run, RunRow)
    assert row.heads == list(HEAD_NAMES)
    assert row.head_choices[Head.OP] == list(OP_NAMES)
    assert row.head_choices[Head.SLOT] == row.slots
    assert row.head_choices[Head.BLUEPRINT] == row.blueprints
    assert [len(names) for names in row.head_choices[Head.STYLE :]] == [4, 3, 3, 4, 5]
    assert (row.iterations, row.envs, row.horizon) == (ITERATIONS, ENVS, STEPS)


@pytest.mark.parametrize("detail", ["summary", "standard", "full"])
def test_each_level_of_telemetry_detail_writes_only_the_tables_of_that_level(
    detail: Detail, tmp_path: Path
) -> None:
    directory = trained(tmp_path / "run", detail=detail, iterations=1)
    written = {table for table in TABLES if read_rows(directory, TABLES[table])}
    assert written <= TABLES_OF_DETAIL[detail]
    assert TABLES_OF_DETAIL[detail] - written <= {"alert"}
    assert TABLES_OF_DETAIL["full"] == set(TABLES)
