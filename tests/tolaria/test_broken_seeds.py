"""Seeds with non-finite weights are pruned without an effect on the host."""

import math
from typing import Any

import pytest
import torch

from esper.leyline import BlueprintAction, LifecycleRules, Stage
from esper.leyline.rows import EpochRow, TransitionRow
from esper.tolaria.env import MorphEnv
from tests.tolaria.building import (
    WAIT,
    ListSink,
    bits,
    host_bits,
    host_tensors,
    plant,
    run,
    stages_of,
    started,
    tiny_task,
)


def poison(env: MorphEnv, slot: int, value: float = math.nan) -> None:
    """Set one weight of a seed to ``value``."""
    with torch.no_grad():
        weight = next(env.model.slot(slot).parameters())
        weight[(0,) * weight.ndim] = value


def governed(sink: ListSink) -> list[TransitionRow]:
    """Return the stage moves that the governor caused."""
    return [row for row in sink.of(TransitionRow) if row.cause == "governor"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_incubating_seed_with_non_finite_weights_is_pruned_and_the_host_trains_as_without_the_seed(
    value: float,
) -> None:
    rules = LifecycleRules(min_training_epochs=9, embargo_epochs=2)
    task = tiny_task(batches_per_epoch=3, rules=rules)
    (env, sink), (twin, _) = started(task), started(task)
    run(env, {0: plant(1, BlueprintAction.CONV_HEAVY)}, until=2)
    poison(env, 1, value)
    for epoch in (3, 4, 5):
        assert env.step(WAIT).epoch == epoch
    run(twin, {}, until=5)
    assert host_bits(env) == host_bits(twin)
    [row] = governed(sink)
    assert (row.epoch, row.slot, row.from_stage, row.to_stage) == (2, 1, Stage.TRAINING, Stage.PRUNED)
    assert row.reason == "non-finite while incubating"
    assert stages_of(env)[1] == Stage.DORMANT, "two epochs of embargo and one of resetting"
    assert [row.skipped_batches for row in sink.of(EpochRow)] == [0] * 5


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_blended_seed_with_non_finite_weights_is_pruned_and_one_minibatch_is_skipped(value: float) -> None:
    env, sink = started()
    run(env, {0: plant(1, BlueprintAction.CONV_HEAVY), 1: plant(0)}, until=4)
    assert stages_of(env)[:2] == [Stage.BLENDING, Stage.BLENDING]
    poison(env, 1, value)

    def trained() -> Any:
        """Return weights and optimiser state of the host and of the seed that is not pruned."""
        own, state = env.model.seed_parameters(0), env.host.optimiser.state
        momenta = [state[p] for p in (*env.model.host_parameters(), *own)]
        return bits([host_tensors(env.model), own, momenta])

    before = trained()
    env.step(WAIT)
    [row] = governed(sink)
    assert (row.slot, row.to_stage, row.reason) == (1, Stage.PRUNED, "non-finite while blended")
    assert sink.of(EpochRow)[-1].skipped_batches == 1
    assert stages_of(env)[:2] == [Stage.BLENDING, Stage.EMBARGOED]
    assert trained() == before
    facts = env.step(WAIT)
    assert trained() != before, "the next epoch trains again"
    assert all(map(math.isfinite, (facts.val_loss, facts.train_loss)))


def test_only_the_blended_seed_whose_gradient_overflows_is_pruned() -> None:
    env, sink = started(tiny_task(batches_per_epoch=2))
    run(env, {0: plant(2), 1: plant(1)}, until=5)
    with torch.no_grad():
        env.model.slot(2).seed[0].bias.fill_(1e25)  # type: ignore[index,operator,union-attr]
    env.step(WAIT)
    # With the huge bias in the seed of slot 2, loss and logits are finite, but the gradient of the output
    # layer is not. Without the seed of slot 2 the gradient would be finite.
    assert [(row.slot, row.to_stage) for row in governed(sink)] == [(2, Stage.PRUNED)]
    assert stages_of(env)[1] == Stage.HOLDING, "the other seed is kept"
    assert all(torch.isfinite(p).all() for p in env.model.parameters())
