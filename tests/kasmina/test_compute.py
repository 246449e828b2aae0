"""The FLOPs that Esper counts for hosts, seeds and whole trainings equal those of torch's FLOP counter."""

from collections.abc import Mapping

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from esper.kasmina.blueprints import blueprint_named
from esper.kasmina.compute import FlopMeter, PartCost, count_part, flop_counter
from esper.leyline import BlueprintAction, LifecycleOp, LifecycleRules, Stage, Style
from esper.tolaria.minibatch import Learner
from esper.tolaria.tasks.spec import CLASSIFICATION
from tests.tolaria.building import (
    WAIT,
    action,
    bits,
    cnn,
    digits,
    grown_model,
    measured_on,
    plant,
    run,
    set_stage,
    started,
    tiny_task,
)

HEAVY, LIGHT, DEPTHWISE = BlueprintAction.CONV_HEAVY, BlueprintAction.CONV_LIGHT, BlueprintAction.DEPTHWISE
SHADOW_SAMPLES = 32
"""Number of samples on which an incubating seed trains if the minibatch has 64 samples."""
CASES = [
    ({}, None),
    ({0: HEAVY}, None),
    ({0: DEPTHWISE, 2: DEPTHWISE}, None),
    ({0: LIGHT, 1: BlueprintAction.CONV_SMALL, 2: HEAVY}, None),
    ({0: HEAVY, 1: LIGHT, 2: BlueprintAction.NORM}, 0),
    ({0: HEAVY, 1: DEPTHWISE, 2: LIGHT}, 1),
    ({2: LIGHT}, 2),
]
"""Test cases: a dict from occupied slot to blueprint of its seed, and the slot of the only incubating seed
(None if all seeds are blended)."""


def test_counted_flops_of_convolutions_equal_values_computed_by_hand() -> None:
    # The seed is of blueprint depthwise, with two branches on 4 channels of 8×8. In each branch the depthwise
    # 3×3 layer has 2·64·9·4 = 4608 FLOPs and the 1×1 layer 2·64·4·4 = 2048, so the forward pass of the seed
    # has 2·(4608 + 2048) = 13312. The gradient of a layer's weights, or of its inputs, costs as much as its
    # forward pass. If the gradient of the seed's input is not needed, the first layer of each branch, a
    # depthwise layer, computes only the gradient of its weights.
    seed = blueprint_named("depthwise", "feature_map").build(4)
    assert count_part(seed, (4, 8, 8)) == PartCost(13312, 2 * 13312, 2 * 13312 - 2 * 4608, 13312)
    # FLOPs of a 3×3 convolution from 4 to 8 channels on the pooled 4×4 map: 2·16·9·4·8 = 9216.
    assert count_part(cnn((4, 8, 8)).segments[1], (4, 8, 8)) == PartCost(9216, 2 * 9216, 9216, 9216)


def test_counted_flops_of_a_token_attention_seed_equal_values_computed_by_hand() -> None:
    # The seed is of blueprint attention, on 6 tokens of width 8, with two branches of 2 heads of size 2.
    # FLOPs per branch: 2·6·8·12 = 1152 for the projection to queries, keys and values, 2·2·(2·6·6·2) = 576
    # for scores and weighted values (counted without the causal mask), and 2·6·4·8 = 384 for the output
    # projection. In a projection, the gradient of the weights, or of the inputs, costs as much as the forward
    # pass. The backward pass of attention recomputes the attention scores and four more products of the same
    # size, so it costs 5/2 of the forward pass, no matter which gradients are required.
    qkv, heads, out = 2 * 1152, 2 * 576, 2 * 384
    forward, attended = qkv + heads + out, 5 * heads // 2
    seed = blueprint_named("attention", "tokens").build(8)
    assert count_part(seed, (6, 8)) == PartCost(
        forward, 2 * qkv + attended + 2 * out, qkv + attended + 2 * out, qkv + attended + out
    )


def test_counting_flops_does_not_change_batch_statistics_gradients_or_random_state() -> None:
    part = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 1), torch.nn.BatchNorm2d(4), torch.nn.Dropout(0.5))
    state, random_state = bits(part.state_dict()), torch.get_rng_state()
    count_part(part, (4, 8, 8))
    assert bits(part.state_dict()) == state
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in part.parameters())


def metered(
    seeds: Mapping[int, BlueprintAction], incubating: int | None
) -> tuple[FlopMeter, torch.optim.Optimizer]:
    """Return a FLOP meter of a network with ``seeds``, and the optimiser of that network."""
    rules = LifecycleRules(min_training_epochs=2)
    styles = (Style.LINEAR_ADD, Style.GATED_GATE, Style.LINEAR_MULTIPLY)
    model, optimiser = grown_model(seeds, styles=styles, rules=rules)
    if incubating is not None:
        set_stage(model, incubating, Stage.TRAINING)
    meter = FlopMeter(model, torch.zeros(1, 8, 8))
    for slot in seeds:
        meter.germinated(slot)
    return meter, optimiser


def count_training(meter: FlopMeter, optimiser: torch.optim.Optimizer, counter: FlopCounterMode) -> int:
    x, y = digits(64)
    meter.model.train()
    with counter:
        Learner(meter.model, optimiser, CLASSIFICATION.loss, clip=5.0).run(x, y)
    return int(counter.get_total_flops())


@pytest.mark.parametrize(("seeds", "incubating"), CASES)
def test_compute_ledger_of_a_minibatch_equals_the_flops_that_torch_counts_during_the_minibatch(
    seeds: dict[int, BlueprintAction], incubating: int | None
) -> None:
    meter, optimiser = metered(seeds, incubating)
    counted = count_training(meter, optimiser, flop_counter())
    meter.trained(64)
    assert meter.ledger.total == counted

    with flop_counter() as forward, torch.no_grad():
        meter.model.eval()(digits(64)[0])
    assert meter.ledger.forward == forward.get_total_flops()

    if incubating is None:
        assert meter.ledger.incubation == 0
        return
    with_seed = meter.ledger
    meter.model.table.clear(0, incubating)
    meter.model.remove(incubating)
    meter.model.sync()
    incubation = counted - count_training(meter, optimiser, flop_counter())
    assert incubation == with_seed.incubation > 0
    assert meter.state()["spent"][incubating] == with_seed.incubation


@pytest.mark.parametrize("switched", [(), (1,), (0, 2), (0, 1, 2)])
def test_compute_ledger_of_a_validation_equals_the_flops_that_torch_counts_during_the_validation(
    switched: tuple[int, ...],
) -> None:
    meter, _ = metered({0: HEAVY, 1: DEPTHWISE, 2: LIGHT}, None)
    x, y = digits(50)
    with flop_counter() as counted:
        result = measured_on(meter.model, x, y, switched)
    meter.validated(50, result.slots, result.configurations)
    with flop_counter() as plain, torch.no_grad():
        meter.model(x)
    assert meter.ledger.total == counted.get_total_flops()
    assert meter.ledger.validation == plain.get_total_flops()
    assert (meter.ledger.counterfactual > 0) == bool(switched)


def test_compute_ledger_of_an_episode_equals_the_flops_that_torch_counts_during_the_episode() -> None:
    env, _ = started(tiny_task(horizon=9))
    # torch's counter starts after the seeds were planted and incubated, because the two counts would differ
    # there: germination runs a seed an extra time to count its FLOPs, and the ledger includes a gradient that
    # incubation does not compute.
    for step in (plant(0, HEAVY), plant(2, DEPTHWISE), WAIT):
        env.step(step)
    before = env.host.meter.ledger.total
    with flop_counter() as counted:
        run(env, {4: action(LifecycleOp.PRUNE, 2), 7: action(LifecycleOp.FOSSILIZE, 0)})
    assert env.host.meter.ledger.total - before == counted.get_total_flops()
    assert env.host.meter.ledger.pruned_seeds > 0


def test_ledger_flops_of_a_pruned_seed_equal_a_value_computed_by_hand() -> None:
    rules = LifecycleRules(min_training_epochs=10, min_prune_age=3)
    env, _ = started(tiny_task((2, 4, 4), rules=rules))
    run(env, {0: plant(2, LIGHT)}, until=3)
    spent = env.host.meter.state()["spent"]
    env.step(action(LifecycleOp.PRUNE, 2))
    # FLOPs of the seed's 3×3 convolution of 4 channels on the 2×2 map: 1152 = 2·4·9·4·4 forward, and 1152
    # backward because only the gradient of the weights is computed. FLOPs of the output layer with 4 inputs
    # and 10 classes: 80 forward and 80 backward. The pruned seed was trained on 32 samples in each of 3
    # epochs.
    assert spent == {2: 3 * 32 * (1152 + 1152 + 80 + 80)}
    assert env.host.meter.ledger.pruned_seeds == spent[2] == env.host.meter.ledger.incubation
    assert env.host.meter.state()["spent"] == {}


def test_ledger_counts_blended_seeds_in_training_and_in_every_validation_forward_pass() -> None:
    meter, _ = metered({0: LIGHT, 2: LIGHT}, None)
    meter.trained(10)
    result = measured_on(meter.model, *digits(7), (0, 2))
    meter.validated(7, result.slots, result.configurations)
    # FLOPs of the first seed, of width 2 on 8×8: 2·64·9·2·2 = 4608. FLOPs of the second seed, of width 8 on
    # 2×2: 2·4·9·8·8 = 4608, and of its gate 2·4·8 = 64. A training step costs as much as three forward
    # passes. In validation the second seed runs twice, with the first seed off and on.
    assert meter.state()["spent"] == {0: 4608 * (3 * 10 + 7), 2: (4608 + 64) * (3 * 10 + 2 * 7)}


class Attending(torch.nn.Module):
    """Self-attention of width 8 with two heads, computed by ``scaled_dot_product_attention``."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(8, 24, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        gathered = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return gathered.transpose(1, 2).flatten(2)


def test_counted_flops_of_scaled_dot_product_attention_equal_a_value_computed_by_hand() -> None:
    # FLOPs of attention on four tokens: projection to queries, keys and values 2·4·8·24 = 1536; scores
    # 2·4·4·8 = 256; weighted values 256.
    assert count_part(Attending(), (4, 8)).forward == 1536 + 2 * 256
