"""Training that reads no tensor from the device during an epoch ends in the same state as training that
checks every minibatch."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from esper.kasmina.device_work import DeviceWork, run_alone
from esper.leyline import BlueprintAction, LifecycleRules
from esper.leyline.rows import EpochRow, TransitionRow
from esper.tolaria.env import MorphEnv
from esper.tolaria.host_training import train_together
from esper.tolaria.minibatch import EpochTraining
from esper.tolaria.tasks import TaskSpec
from tests.tolaria.building import WAIT, ListSink, bits, noisy_task, plant, run, started, token_task
from tests.tolaria.reads import counted_reads, step_counts
from tests.tolaria.test_reproducibility import everything_in, timeless

SLOW = LifecycleRules(min_training_epochs=3, min_prune_age=1, embargo_epochs=2)


@pytest.mark.parametrize("make_task", [noisy_task, token_task])
def test_training_epoch_with_blended_and_incubating_seeds_reads_no_tensor_from_the_device(
    make_task: Callable[..., TaskSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    env, sink = started(make_task(batches_per_epoch=3, rules=SLOW))
    tokens = env.task.host == "gpt"
    kinds = (
        (BlueprintAction.MLP, BlueprintAction.LORA)
        if tokens
        else (BlueprintAction.CONV_LIGHT, BlueprintAction.ATTENTION)
    )
    run(env, {0: plant(1, kinds[0]), 4: plant(0, kinds[1])}, until=5)
    assert (env.model.blended, env.model.incubating) == ([1], [0])
    env.begin_step(WAIT)
    with counted_reads(monkeypatch, lambda: step_counts(env), "cpu numpy tolist") as reads:
        train_together([env.host])
    assert not reads.calls
    assert math.isfinite(run_alone(env.end_step()).train_loss)
    assert env.table.gradient_norm[0, :2].all(), "the gradients of both seeds were measured"
    assert sink.of(EpochRow)[-1].skipped_batches == 0


# --- comparison with checked minibatches -----------------------------------------------------------


def not_finite() -> DeviceWork[EpochTraining]:
    """Return the result of an epoch with a non-finite loss, without a read."""
    yield from ()
    return EpochTraining(finite=False)


def checking(env: MorphEnv) -> MorphEnv:
    """Make the environment check every minibatch for non-finite numbers; return the environment."""
    begin = env.host.begin_epoch

    def begin_epoch(epoch: int) -> None:
        begin(epoch)
        env.host._start = lambda: None
        env.host._training.read = not_finite  # type: ignore[method-assign]

    env.host.begin_epoch = begin_epoch  # type: ignore[method-assign]
    env.host.train_minibatch = lambda *batch: None  # type: ignore[method-assign]
    return env


def compared(task: TaskSpec, spoil: Callable[[MorphEnv], None]) -> list[tuple[MorphEnv, ListSink]]:
    """Run ten epochs twice, without and with checks of every minibatch; ``spoil`` is called before the
    seventh epoch.

    Before the seventh epoch two seeds are blended and one incubates.
    """
    pairs = [started(task), started(task)]
    checking(pairs[1][0])
    plan = {0: plant(1), 1: plant(2, BlueprintAction.CONV_HEAVY), 5: plant(0, BlueprintAction.NORM)}
    for env, _ in pairs:
        run(env, plan, until=6)
        assert (env.model.blended, env.model.incubating) == ([1, 2], [0])
        spoil(env)
        run(env, {}, until=10)
    return pairs


def first_weight(slot: int | None, value: float) -> Callable[[MorphEnv], None]:
    """Return a function that sets one weight of a seed, or of the host, to ``value``."""

    def spoil(env: MorphEnv) -> None:
        weights = env.model.host_parameters() if slot is None else env.model.seed_parameters(slot)
        with torch.no_grad():
            weights[0][(0,) * weights[0].ndim] = value

    return spoil


@pytest.mark.parametrize(
    ("spoil", "pruned", "skipped", "rolled_back"),
    [
        (lambda env: None, [], 0, 0),
        (first_weight(0, math.nan), [0], 0, 0),
        # The infinite weight passes through tanh, so loss and gradient stay finite.
        (first_weight(0, math.inf), [0], 0, 0),
        (first_weight(1, math.nan), [1], 1, 0),
        (first_weight(2, math.inf), [2], 1, 0),
        (first_weight(None, math.nan), [], 1, 1),
    ],
    ids=[
        "nothing broken",
        "incubating seed nan",
        "incubating seed inf",
        "blended seed nan",
        "blended seed inf",
        "host nan",
    ],
)
def test_epoch_without_reads_from_the_device_ends_in_the_same_state_as_an_epoch_with_checked_minibatches(
    spoil: Callable[[MorphEnv], None], pruned: list[int], skipped: int, rolled_back: int
) -> None:
    task = noisy_task(batches_per_epoch=4, horizon=12, rules=SLOW)
    (env, sink), (reference, expected) = compared(task, spoil)
    assert everything_in(env) == everything_in(reference)
    assert bits(env.host.meter.state()) == bits(reference.host.meter.state())
    assert env.host.minibatches == reference.host.minibatches
    assert timeless(sink.rows) == timeless(expected.rows)
    assert sum(row.skipped_batches for row in sink.of(EpochRow)) == skipped
    assert env._recovery.rollbacks == rolled_back
    governed = [row for row in sink.of(TransitionRow) if row.cause == "governor"]
    assert rolled_back or [row.slot for row in governed] == pruned


def test_epoch_repeated_after_a_non_finite_loss_draws_the_same_augmentation() -> None:
    task = replace(noisy_task(batches_per_epoch=3, rules=SLOW), augment=True)
    (env, _), (reference, _) = compared(task, first_weight(1, math.nan))
    assert bits(env.host._augmenting.get_state()) == bits(reference.host._augmenting.get_state())
    assert everything_in(env) == everything_in(reference)
