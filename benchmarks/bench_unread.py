"""Cost of an epoch whose losses are read from the device once at its end, relative to an epoch with a read
after every minibatch (ADR 0026).
"""

import pytest

from benchmarks.timing import cpu_times, figure
from esper.kasmina.device_work import DeviceWork, run_alone
from esper.leyline.slot_table import IntArray
from esper.tolaria.env import MorphEnv
from esper.tolaria.host_training import train_together
from esper.tolaria.minibatch import EpochTraining
from esper.tolaria.tasks import task_named
from tests.tolaria.building import WAIT, plant

LIMIT = 1.05


def grown(plan: dict[int, IntArray]) -> MorphEnv:
    env = MorphEnv(task_named("digits_impaired"), rng_seed=0)
    env.reset()
    for epoch in range(max(plan, default=0) + 1):
        env.step(plan.get(epoch, WAIT))
    return env


def not_finite() -> DeviceWork[EpochTraining]:
    """Return the result of an epoch with a non-finite loss, which is then run with checks, without a read."""
    yield from ()
    return EpochTraining(finite=False)


def train(env: MorphEnv, *, look: bool) -> None:
    env.host.begin_epoch(env.epoch)
    if look:
        env.host._start = lambda: None
        env.host._training.read = not_finite  # type: ignore[method-assign]
    else:
        train_together([env.host])
    run_alone(env.host.end_epoch(env._recovery))


@pytest.mark.parametrize(
    ("seeds", "plan"),
    [
        ("no seed", {}),
        ("an incubating seed", {0: plant(1)}),
        ("two blended seeds", {0: plant(1), 1: plant(0), 6: WAIT}),
    ],
)
def bench_an_unread_epoch_costs_no_more_than_one_that_is_looked_at(
    seeds: str, plan: dict[int, IntArray]
) -> None:
    env = grown(plan)
    times = cpu_times(
        {"unread": lambda: train(env, look=False), "looked at": lambda: train(env, look=True)}, repeats=2
    )
    batches = len(env.host.chosen)
    figure(
        f"an unread epoch with {seeds}, digits_impaired",
        times["unread"] / times["looked at"],
        "times one that is looked at",
        at_most=LIMIT,
        note=f"{times['unread'] / batches:.2f} ms a minibatch",
    )
