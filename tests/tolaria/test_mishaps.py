"""The governor raises an alarm within three epochs after an episode on digits is broken.

The file test_report_fields.py tests that an unbroken episode raises no alarm; experiments/011-governor covers
all tasks.
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


def raise_learning_rate(env: MorphEnv) -> None:
    """Multiply the learning rate of host and seeds by 30."""
    env.host.instance = replace(env.host.instance, learning_rate=30 * env.host.instance.learning_rate)


def freeze_output_layer(env: MorphEnv) -> None:
    """Set the output layer to zero and freeze the layer, so that the output of the network is constant."""
    last = [module for module in env.model.host.modules() if isinstance(module, nn.Linear)][-1]
    for parameter in last.parameters():
        nn.init.zeros_(parameter)
        parameter.requires_grad_(requires_grad=False)


@pytest.mark.parametrize(
    ("mishap", "kinds"),
    [(raise_learning_rate, {"divergence", "collapse"}), (freeze_output_layer, {"collapse"})],
)
def test_governor_raises_an_alarm_within_three_epochs_after_an_episode_is_broken(
    mishap: Callable[[MorphEnv], None], kinds: set[str]
) -> None:
    env, sink = started(task_named("digits"))
    run(env, PLAN, until=WRONG_AFTER)
    assert sink.of(AlertRow) == [], "no alarm before the mishap"
    mishap(env)
    run(env, {}, until=WRONG_AFTER + IN_TIME)
    alert = sink.of(AlertRow)[0]
    assert alert.rule in kinds
    assert WRONG_AFTER < (alert.epoch or 0) <= WRONG_AFTER + IN_TIME
