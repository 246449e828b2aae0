"""Rollouts represent actions as integer arrays and never build a ``FactoredAction``."""

from pathlib import Path
from typing import NoReturn

import pytest

from esper.leyline import CANONICAL_ACTION, FactoredAction, Head, LifecycleRules
from esper.simic.config import TrainingConfig
from esper.simic.training.policy_env import GrowthEnv
from esper.simic.training.rollout import ActionStreams, collect
from tests.tamiyo.policy.small_policies import policy_of
from tests.tolaria.building import tiny_task

NUM_ENVS = 2
AT_ONCE = LifecycleRules(min_training_epochs=0, min_prune_age=1, embargo_epochs=1)
WAIT = FactoredAction.from_indices(CANONICAL_ACTION)


class ObjectBuiltError(AssertionError):
    """Error that is raised when a ``FactoredAction`` is built."""


@pytest.fixture(autouse=True)
def no_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every construction of a ``FactoredAction`` raise ``ObjectBuiltError``."""

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise ObjectBuiltError

    # `__new__` is not patched: removing the patch would not restore construction in CPython.
    monkeypatch.setattr(FactoredAction, "__init__", refuse)
    monkeypatch.setattr(FactoredAction, "from_indices", refuse)


def test_rollout_builds_no_factored_action(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPER_CACHE", str(tmp_path))
    task = tiny_task(rules=AT_ONCE, horizon=8)
    policy = policy_of(task.num_slots)
    env = GrowthEnv(task, TrainingConfig(), rng_seed=0, env_indices=range(NUM_ENVS))
    buffer = collect(env, policy, ActionStreams(0, range(NUM_ENVS)))
    assert len(env.reports) == NUM_ENVS
    assert len(buffer.actions[..., Head.OP].unique()) > 2, "several ops were applied"
