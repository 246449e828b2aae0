"""Arms × rng seeds × episodes: paired, in order, and the episodes that a run of the same rng seed leads."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from esper.config import run_config
from esper.karn.run import read_rows
from esper.leyline.rows import EpisodeRow
from esper.runner import run_arm
from esper.study import Cell, means_by_rng_seed, run_study
from esper.tolaria.vector import SerialVector

ARMS: dict[str, dict[str, object]] = {
    "off": {"controller": "off"},
    "planted": {"controller": "periodic", "plan": "conv_light/fast@r0c1:0"},
}
SHORT = {"task": "digits_impaired", "steps": 2}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Cell]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ESPER_CACHE", str(tmp_path_factory.mktemp("cache")))
        context = multiprocessing.get_context("forkserver")  # as spawn does it, with torch imported already
        patch.setattr(multiprocessing, "get_context", lambda how: context)
        return run_study({arm: {**SHORT, **own} for arm, own in ARMS.items()}, [4, 3], episodes=2)


def test_cells_come_in_the_order_of_rng_seeds_and_of_their_episodes(results: dict[str, list[Cell]]) -> None:
    assert list(results) == list(ARMS)
    for arm, cells in results.items():
        assert [(cell.arm, cell.rng_seed, cell.episode) for cell in cells] == [
            (arm, 4, 0), (arm, 4, 1), (arm, 3, 0), (arm, 3, 1),
        ]  # fmt: skip


def test_every_rng_seed_and_every_episode_is_another_one(results: dict[str, list[Cell]]) -> None:
    assert len({cell.val_score for cell in results["off"]} | {cell.test_score for cell in results["off"]}) > 4


def test_an_episode_is_that_of_a_run(
    results: dict[str, list[Cell]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESPER_CACHE", str(tmp_path / "cache"))
    config = run_config(**SHORT, **ARMS["planted"], rng_seed=3, episodes=2)
    run_arm(config, config.controller, tmp_path / "run")
    found = [(row.test_score, row.params) for row in read_rows(tmp_path / "run", EpisodeRow)]
    assert found == [(cell.test_score, cell.params) for cell in results["planted"][2:]]


def test_an_rng_seed_counts_once_with_the_mean_of_its_episodes(results: dict[str, list[Cell]]) -> None:
    first, second, third, fourth = (cell.test_score for cell in results["off"])
    means = means_by_rng_seed(results, lambda cell: cell.test_score)
    assert means["off"] == pytest.approx([(first + second) / 2, (third + fourth) / 2])


def test_rng_seeds_are_dealt_out_to_devices_and_no_score_depends_on_it(
    results: dict[str, list[Cell]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr(SerialVector, "reset", _noting(SerialVector.reset, made))
    again = run_study({"off": {**SHORT, **ARMS["off"]}}, [4, 3], processes=1, devices=("cpu:0", "cpu:1"))
    assert list(dict.fromkeys(made)) == [(4, "cpu:0"), (3, "cpu:1")]
    assert again["off"] == [cell for cell in results["off"] if cell.episode == 0]


def _noting(reset: Any, made: list[tuple[int, str]]) -> Any:
    """``reset`` of a vector, with a note of which rng seed runs where."""

    def noted(vector: SerialVector, *args: Any, **kwargs: Any) -> Any:
        [env] = vector.envs
        made.append((env._rng_seed, env.compute.device.name))
        return reset(vector, *args, **kwargs)

    return noted
