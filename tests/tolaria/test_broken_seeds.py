"""Seeds that are no longer finite: they go, and the host stays as it was."""

import math
from typing import Any

import pytest
import torch

from esper.leyline import BlueprintAction, LifecycleRules, Stage
from esper.leyline.rows import EpochRow, TransitionRow
from esper.tolaria.env import MorphEnv
from tests.tolaria.building import WAIT, ListSink, bits, host_bits, plant, run, stages_of, started, tiny_task


def poison(env: MorphEnv, slot: int, value: float = math.nan) -> None:
    with torch.no_grad():
        weight = next(env.model.slot(slot).parameters())
        weight[(0,) * weight.ndim] = value


def governed(sink: ListSink) -> list[TransitionRow]:
    return [row for row in sink.of(TransitionRow) if row.cause == "governor"]


@pytest.mark.parametrize("incubation", ["shadow", "straight_through"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_incubating_seed_is_removed_and_the_host_never_notices(
    value: float, incubation: str
) -> None:
    rules = LifecycleRules(min_training_epochs=9, embargo_epochs=2, incubation=incubation)  # type: ignore[arg-type]
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
    assert stages_of(env)[1] == Stage.DORMANT, "two epochs of embargo and one of cleaning up"
    assert [row.skipped_batches for row in sink.of(EpochRow)] == [0] * 5


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_blended_seed_that_breaks_costs_one_minibatch_and_leaves_the_host_at_its_last_finite_step(
    value: float,
) -> None:
    env, sink = started()
    run(env, {0: plant(1, BlueprintAction.CONV_HEAVY), 1: plant(0)}, until=4)
    assert stages_of(env)[:2] == [Stage.BLENDING, Stage.BLENDING]
    poison(env, 1, value)

    def trained() -> Any:
        """What a step of training changes: weights and optimisers of the host and of the seed that stays."""
        own = env.model.slot(0).optimiser
        assert own is not None
        weights = env.model.host.state_dict(), env.model.seed_parameters(0)
        return bits([*weights, env.host.optimiser.state_dict()["state"], own.state_dict()["state"]])

    before = trained()
    env.step(WAIT)
    [row] = governed(sink)
    assert (row.slot, row.to_stage, row.reason) == (1, Stage.PRUNED, "non-finite while blended")
    assert sink.of(EpochRow)[-1].skipped_batches == 1
    assert stages_of(env)[:2] == [Stage.BLENDING, Stage.EMBARGOED]
    assert trained() == before
    facts = env.step(WAIT)
    assert trained() != before, "and from there it learns on"
    assert all(map(math.isfinite, (facts.val_loss, facts.train_loss)))


def test_a_seed_whose_gradient_overflows_is_blamed_alone() -> None:
    env, sink = started(tiny_task(batches_per_epoch=2))
    run(env, {0: plant(2), 1: plant(1)}, until=5)
    with torch.no_grad():
        env.model.slot(2).seed[0].bias.fill_(1e25)  # type: ignore[index,operator,union-attr]
    env.step(WAIT)
    # Loss and logits stay finite; the head's gradient does not, and does without this seed.
    assert [(row.slot, row.to_stage) for row in governed(sink)] == [(2, Stage.PRUNED)]
    assert stages_of(env)[1] == Stage.HOLDING, "it went on as if nothing had happened"
    assert all(torch.isfinite(p).all() for p in env.model.parameters())
