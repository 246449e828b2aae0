"""Replay of a recording: observations of the past alone, recorded decisions only, regrets of the leaves."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import esper.gym  # noqa: F401  registers the environment
from esper.growbench import FEATURES, Cell, RecordingError, evaluate, load
from esper.growbench.instances import DECISION_POINTS, Plan
from esper.growbench.replay import Features
from esper.growbench.replay_env import GrowBenchEnv
from esper.leyline import InvalidActionError
from tests.growbench.conftest import PLANS
from tests.growbench.test_recording import rewritten


def replayed(env: GrowBenchEnv, cell: int, plan: Plan) -> tuple[float, dict[str, object]]:
    env.reset(options={"cell": cell})
    for step in DECISION_POINTS:
        _, reward, ended, _, info = env.step(int(step in plan))
    assert ended
    return reward, info


def test_every_recorded_plan_is_replayed_with_its_regret(recording: Path) -> None:
    env = GrowBenchEnv(recording)
    assert len(env.cells) == 4
    for number, cell in enumerate(env.cells):
        losses = {plan: row.test_loss for plan, row in cell.plans.items()}
        for plan in PLANS:
            reward, info = replayed(env, number, plan)
            assert reward == pytest.approx(-100.0 * np.log(losses[plan] / min(losses.values())))
            assert info["plan"] == plan
        assert {plan for plan in PLANS if replayed(env, number, plan)[0] == 0.0}


def test_plan_that_was_not_recorded_is_refused_with_the_nearest_one(recording: Path) -> None:
    env = GrowBenchEnv(recording)
    _, info = env.reset(options={"cell": 0})
    assert list(info["action_mask"]) == [1, 1]
    for _ in range(2):
        _, _, _, _, info = env.step(0)
    assert list(info["action_mask"]) == [1, 0]
    nearest = r"plan \(3,\) was not recorded .* nearest recorded plan is \(2,\)"
    with pytest.raises(RecordingError, match=nearest):
        env.step(1)
    with pytest.raises(InvalidActionError, match="neither 0"):
        env.step(2)
    with pytest.raises(RecordingError, match=r"nearest recorded plan is \(2, 5\)"):
        env.cells[0].regret((3, 5))
    assert not env.action_masks()[1]


def test_checker_of_gymnasium_accepts_the_environment(recording: Path) -> None:
    env = gymnasium.make("esper/GrowBench-v0", folder=recording)
    plain = env.unwrapped
    assert isinstance(plain, GrowBenchEnv)
    check_env(plain, skip_render_check=True)


def test_episodes_of_one_rng_seed_are_equal_and_families_can_be_chosen(recording: Path) -> None:
    env = GrowBenchEnv(recording, families=("two",))
    assert {cell.first.family for cell in env.cells} == {"two"}
    first, _ = env.reset(seed=5)
    again, _ = env.reset(seed=5)
    assert np.array_equal(first, again)
    with pytest.raises(InvalidActionError, match="no instance of the families"):
        GrowBenchEnv(recording, families=("three",))


def test_observations_do_not_depend_on_later_decisions_or_losses(recording: Path, tmp_path: Path) -> None:
    shutil.copytree(recording, tmp_path, dirs_exist_ok=True)
    later = "SELECT * REPLACE (CASE WHEN step > 14 THEN 9.0 ELSE {0} END AS {0}) FROM read_parquet(FILE)"
    for column in ("val_loss", "train_loss", "host_gradient_norm"):
        rewritten(tmp_path, "steps", later.format(column))
    rewritten(tmp_path, "plans", "SELECT * FROM read_parquet(FILE) WHERE plan IN ('', '2')")
    for ours, theirs in zip(load(tmp_path), load(recording), strict=True):
        nodes = [node for node in ours.nodes if DECISION_POINTS[node[1]] <= 14]
        assert len(nodes) > 10
        for node in nodes:
            assert np.array_equal(
                ours.observations[ours.nodes[node]], theirs.observations[theirs.nodes[node]]
            )


def test_unknown_features_are_zero_and_marked_as_unknown(recording: Path) -> None:
    cell = load(recording)[0]
    count = len(FEATURES)
    begin = cell.observations[cell.nodes[(), 0]]
    known = dict(zip(FEATURES, begin[count:], strict=True))
    assert known["progress"] == known["candidate_cost"] == 1.0
    assert known["gain_per_doubling"] == known["contribution"] == 0.0
    assert begin[FEATURES.index("gain_per_doubling")] == 0.0
    grown = cell.observations[cell.nodes[(2,), DECISION_POINTS.index(14)]]
    assert grown[count:].all()


class Recorder:
    """Waits always, and notes the families that it was fitted with."""

    def __init__(self) -> None:
        self.fitted: list[set[str]] = []

    def fit(self, cells: Sequence[Cell]) -> None:
        self.fitted.append({cell.first.family for cell in cells})

    def grows(self, observation: Features) -> bool:
        return False


def test_controller_is_evaluated_on_the_family_that_its_fit_did_not_see(recording: Path) -> None:
    cells, controller = load(recording), Recorder()
    found = evaluate(cells, lambda: controller)
    assert controller.fitted == [{"two"}, {"one"}]
    expected = {n: np.mean([c.regret(()) for c in cells if c.first.instance == n]) for n in (0, 1)}
    assert found.by_instance == pytest.approx(expected)
    assert found.refused == 0.0
    assert found.mean.size == 2


def test_decision_that_was_not_recorded_is_counted_and_replaced(recording: Path) -> None:
    class Always(Recorder):
        def grows(self, observation: Features) -> bool:
            return True

    cells = load(recording)
    found = evaluate(cells, Always)
    expected = {n: np.mean([c.regret((0, 2)) for c in cells if c.first.instance == n]) for n in (0, 1)}
    assert found.by_instance == pytest.approx(expected)
    assert found.refused == pytest.approx(0.8)


def test_cells_of_one_family_cannot_be_evaluated(recording: Path) -> None:
    cells = [cell for cell in load(recording) if cell.first.family == "one"]
    with pytest.raises(RecordingError, match="cells are of 1 families; a controller needs at least 2"):
        evaluate(cells, Recorder)
