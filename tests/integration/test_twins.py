"""Twins without growth: damaged and unwritable caches of their scores, and twins that diverge."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from esper.leyline.errors import DivergedError
from esper.run.policy_training import train
from esper.tolaria import twin
from esper.tolaria.env import MorphEnv
from esper.tolaria.twin import TwinOf, twin_scores
from tests.integration.training import full_disk, sentence_from, tiny
from tests.tolaria.building import tiny_task

EPISODES = [TwinOf(env=5, episode=3), TwinOf(env=6, episode=3)]


@pytest.mark.usefixtures("cache")
def test_training_ends_with_a_one_sentence_error_if_a_twin_diverges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def diverge(*args: object, **options: object) -> None:
        raise DivergedError("the host became non-finite")

    monkeypatch.setattr(twin, "run_all_without_growth", diverge)
    config = tiny(reward_family="paired", rng_seed=3)
    said = sentence_from(capsys, lambda: train(config, tmp_path / "run"))
    assert ("the do-nothing twins of episode 0 could not be made: the host became non-finite") in said


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[" * 100_000,
        lambda text: "null",
        lambda text: json.dumps(json.loads(text)["scores"]),
        lambda text: cached([float("nan"), 1.0, 2.0]),
        lambda text: cached([1.0, 2.0]),
        lambda text: cached([None, 2.0, 3.0]),
        lambda text: json.dumps({**json.loads(text), "scores": [1.0, 2.0, 3.0]}),
    ],
    ids=["truncated", "deeply nested", "null", "no digest", "nan", "too short", "null score", "wrong digest"],
)
def test_twin_scores_are_recomputed_if_their_cache_file_is_damaged(
    spoil: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESPER_CACHE", str(tmp_path))
    task = tiny_task(horizon=2)
    scores = twin_scores(task, EPISODES, rng_seed=7)
    file = next((tmp_path / "twins").iterdir())
    kept = file.read_text()
    file.write_text(spoil(kept))
    assert twin_scores(task, EPISODES, rng_seed=7) == scores
    assert file.read_text() == kept, "and kept again"


def cached(scores: list[Any]) -> str:
    """Return the content of a cache file with the given twin scores and a valid digest."""
    return json.dumps({"scores": scores, "sha256": hashlib.sha256(json.dumps(scores).encode()).hexdigest()})


def test_cached_twin_scores_are_not_recomputed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPER_CACHE", str(tmp_path))
    task = tiny_task(horizon=2)
    scores = twin_scores(task, EPISODES, rng_seed=7)
    monkeypatch.setattr(MorphEnv, "begin_step", lambda *args: pytest.fail("made again"))
    assert twin_scores(task, EPISODES, rng_seed=7) == scores


def test_twin_scores_are_the_same_if_the_cache_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = tiny_task(horizon=2)
    monkeypatch.setenv("ESPER_CACHE", str(tmp_path / "good"))
    scores = twin_scores(task, EPISODES, rng_seed=7)
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("ESPER_CACHE", str(tmp_path / "file"))
    assert twin_scores(task, EPISODES, rng_seed=7) == scores
    monkeypatch.setenv("ESPER_CACHE", str(tmp_path / "full"))
    monkeypatch.setattr(os, "replace", full_disk)
    assert twin_scores(task, EPISODES, rng_seed=7) == scores
    assert not list((tmp_path / "full" / "twins").iterdir())
