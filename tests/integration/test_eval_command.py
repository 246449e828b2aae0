"""Episodes of ``esper eval``: order of the reports, scores, and assignment of rng seeds to devices."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from esper.karn.run import read_rows
from esper.leyline.rows import EpisodeRow
from esper.run.arm import run_arm
from esper.run.run_config import run_config
from esper.scripts.eval_command import Reports, run_arms
from esper.tolaria.vector import SerialVector

ARMS: dict[str, dict[str, object]] = {
    "off": {"controller": "off"},
    "planted": {"controller": "periodic", "plan": "conv_light/fast@r0c1:0"},
}
SHORT = {"task": "digits_impaired", "steps": 2}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reports]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ESPER_CACHE", str(tmp_path_factory.mktemp("cache")))
        # With the start method forkserver, torch is imported once for all child processes.
        context = multiprocessing.get_context("forkserver")
        patch.setattr(multiprocessing, "get_context", lambda how: context)
        arms = {arm: {**SHORT, **own} for arm, own in ARMS.items()}
        return run_arms(arms, [4, 3], episodes=2, processes=2)


def test_episode_reports_of_an_evaluation_in_two_processes_are_ordered_by_rng_seed_and_episode(
    results: dict[str, Reports], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare the reports of the evaluation for rng seed 3 with the episode rows of a run with rng seed 3."""
    monkeypatch.setenv("ESPER_CACHE", str(tmp_path / "cache"))
    config = run_config(**SHORT, **ARMS["planted"], rng_seed=3, episodes=2)
    run_arm(config, config.controller, tmp_path / "run")
    found = [(row.test_score, row.params) for row in read_rows(tmp_path / "run", EpisodeRow)]
    assert list(results) == list(ARMS)
    assert found == [(report.test_score, report.params) for report in results["planted"][1]]


def test_evaluated_episodes_of_different_rng_seeds_have_different_scores(results: dict[str, Reports]) -> None:
    reports = [report for episodes in results["off"] for report in episodes]
    assert len({report.val_score for report in reports} | {report.test_score for report in reports}) > 4


def test_evaluation_assigns_rng_seeds_to_devices_in_turn_without_effect_on_scores(
    results: dict[str, Reports], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, str]] = []
    monkeypatch.setattr(SerialVector, "reset", _recording(SerialVector.reset, made))
    again = run_arms({"off": {**SHORT, **ARMS["off"]}}, [4, 3], devices=("cpu:0", "cpu:1"))
    assert list(dict.fromkeys(made)) == [(4, "cpu:0"), (3, "cpu:1")]
    assert again["off"] == [episodes[:1] for episodes in results["off"]]


def _recording(reset: Any, made: list[tuple[int, str]]) -> Any:
    """Wrap ``SerialVector.reset`` so that each call appends rng seed and device to ``made``."""

    def recorded(vector: SerialVector, *args: Any, **kwargs: Any) -> Any:
        [env] = vector.envs
        made.append((env._rng_seed, env.compute.device.name))
        return reset(vector, *args, **kwargs)

    return recorded
