"""Episodes on the real digits that go wrong are noticed within three epochs.

A healthy one is left alone in test_report_fields.py. For every task, with more episodes:
experiments/011-governor.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import nn

from esper.leyline.rows import AlertRow
from esper.tolaria.env import MorphEnv
from esper.tolaria.tasks import task_named
from tests.tolaria.building import plant, run, started

WRONG_AFTER, IN_TIME = 6, 3
PLAN = {0: plant(1), 3: plant(0)}


def fast(env: MorphEnv) -> None:
    """The learning rate, of the host and of its seeds, times 30."""
    recipe = env.model.recipe
    env.model._recipe = replace(recipe, settings={**recipe.settings, "lr": 30 * recipe.learning_rate})


def forgetful(env: MorphEnv) -> None:
    """The layer before the answer, at zero for good: nothing is left but a guess."""
    last = [module for module in env.model.host.modules() if isinstance(module, nn.Linear)][-1]
    for parameter in last.parameters():
        nn.init.zeros_(parameter)
        parameter.requires_grad_(requires_grad=False)


@pytest.mark.parametrize(("mishap", "kinds"), [(fast, {"divergence", "collapse"}), (forgetful, {"collapse"})])
def test_an_episode_that_goes_wrong_is_noticed_in_time(
    mishap: Callable[[MorphEnv], None], kinds: set[str]
) -> None:
    env, sink = started(task_named("digits"))
    run(env, PLAN, until=WRONG_AFTER)
    assert sink.of(AlertRow) == [], "all was well"
    mishap(env)
    run(env, {}, until=WRONG_AFTER + IN_TIME)
    alert = sink.of(AlertRow)[0]
    assert alert.rule in kinds
    assert WRONG_AFTER < (alert.epoch or 0) <= WRONG_AFTER + IN_TIME
