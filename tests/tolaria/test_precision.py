"""Mixed precision: float32 weights, separate loss scales, detection of overflow and non-finite seeds."""

import math
from typing import Any

import pytest
import torch
from torch.amp.grad_scaler import GradScaler

from esper.leyline import BlueprintAction, Stage
from esper.leyline.rows import EpochRow, TransitionRow
from esper.tolaria.devices import DEFAULT_DEVICE, HOST, Amp, Compute, Device
from esper.tolaria.env import MorphEnv
from tests.tolaria.building import (
    WAIT,
    ListSink,
    bits,
    host_bits,
    host_tensors,
    noisy_task,
    plant,
    run,
    stages_of,
    started,
    tiny_task,
    token_task,
)
from tests.tolaria.test_reproducibility import everything_in

PLAN = {0: plant(1), 4: plant(0, BlueprintAction.CONV_HEAVY)}
"""Actions by epoch; at epoch 5 the seed of slot 1 is blended and that of slot 0 incubates."""
DEVICES = [
    DEFAULT_DEVICE,
    pytest.param(
        Device("cuda:0"), marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    ),
]
"""Devices on which float16 is tested. Commands refuse float16 on the CPU only because it is slow."""


def mixed(amp: Amp, device: Device = DEFAULT_DEVICE, **changes: Any) -> tuple[MorphEnv, ListSink]:
    """Return a started environment that trains in precision ``amp``, and the sink of its telemetry rows."""
    task = tiny_task(**{"batches_per_epoch": 3, "horizon": 10, **changes})
    return started(task, compute=Compute(device, amp))


def overflow_next(env: MorphEnv, part: int) -> None:
    """Set a loss scale at which every float16 gradient overflows."""
    env.host.precision._scalers[part] = GradScaler(env.compute.device.torch.type, init_scale=2.0**40)


@pytest.mark.parametrize("task", [tiny_task(batches_per_epoch=3), token_task()])
def test_bfloat16_changes_the_training_and_leaves_weights_and_gradients_float32(task: Any) -> None:
    kinds = (BlueprintAction.LORA, BlueprintAction.MLP)
    plan = {0: plant(1, kinds[0]), 3: plant(0, kinds[1])} if task.host == "gpt" else PLAN
    ends = []
    for amp in ("off", "bfloat16", "bfloat16"):
        env, sink = started(task, compute=Compute(DEFAULT_DEVICE, amp))
        run(env, plan, until=5)
        parameters = list(env.model.parameters())
        assert {p.dtype for p in parameters} == {torch.float32}
        assert {p.grad.dtype for p in parameters if p.grad is not None} == {torch.float32}
        assert all(row.skipped_batches == row.skipped_steps == 0 for row in sink.of(EpochRow))
        ends.append((everything_in(env), sink.of(EpochRow)[-1].train_loss))
    assert ends[0][0] != ends[1][0]
    assert ends[1] == ends[2], "the same rng seed gives the same run"
    assert ends[0][1] == pytest.approx(ends[1][1], rel=0.05)


@pytest.mark.parametrize("device", DEVICES)
def test_incubating_seed_has_its_own_float16_loss_scale_until_it_is_blended(device: Device) -> None:
    env, _ = mixed("float16", device)
    run(env, PLAN, until=5)
    assert (env.model.blended, env.model.incubating) == ([1], [0])
    assert set(env.host.precision._scalers) == {HOST, 0}
    env.step(WAIT)
    assert stages_of(env)[0] == Stage.BLENDING
    assert set(env.host.precision._scalers) == {HOST}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("part", [HOST, 0])
def test_float16_steps_with_overflowing_gradients_are_skipped_and_counted(part: int, device: Device) -> None:
    env, sink = mixed("float16", device)
    run(env, PLAN, until=5)
    overflow_next(env, part)
    host, seed = bits(host_tensors(env.model)), bits(env.model.seed_parameters(0))
    env.step(WAIT)
    assert sink.of(EpochRow)[-1].skipped_steps == 3, "every minibatch of the epoch"
    assert sink.of(EpochRow)[-1].skipped_batches == 0, "an overflow of the scale is no broken minibatch"
    assert (bits(host_tensors(env.model)) == host) == (part == HOST)
    assert (bits(env.model.seed_parameters(0)) == seed) == (part == 0)
    assert env.host.precision._scalers[part].get_scale() == 2.0**37, "halved at every overflow"
    assert env._recovery.rollbacks == 0


@pytest.mark.parametrize("device", DEVICES)
def test_recorded_gradient_norms_and_health_in_float16_are_those_of_unscaled_gradients(
    device: Device,
) -> None:
    seen = []
    for amp in ("off", "float16"):
        env, sink = mixed(amp, device)
        run(env, PLAN, until=6)
        seen.append([sink.of(EpochRow)[-1].host_gradient_norm, *env.table.gradient_norm[0, :2]])
        assert env.table.gradient_health[0, :2].tolist() == [1.0, 1.0]
    assert seen[1] == pytest.approx(seen[0], rel=0.25), "scaled norms would be 65536 times as large"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("slot", "reason"), [(0, "non-finite while incubating"), (1, "non-finite while blended")]
)
def test_seed_with_non_finite_weights_is_pruned_in_float16_and_the_loss_scale_is_restored(
    slot: int, reason: str, device: Device
) -> None:
    env, sink = mixed("float16", device)
    run(env, PLAN, until=5)
    torch.nn.init.constant_(env.model.seed_parameters(slot)[0], math.nan)
    env.step(WAIT)
    governed = [row for row in sink.of(TransitionRow) if row.cause == "governor"]
    assert [(row.slot, row.reason) for row in governed] == [(slot, reason)]
    assert env.host.precision._scalers[HOST].get_scale() == 65536.0, (
        "the epoch with the broken seed is undone"
    )


def test_seed_whose_float16_gradient_overflows_at_loss_scale_one_is_pruned() -> None:
    env, sink = mixed("float16")
    run(env, PLAN, until=5)
    env.host.precision._scalers[HOST] = GradScaler("cpu", init_scale=4.0)
    env.model.seed_parameters(1)[0].register_hook(lambda gradient: gradient * math.inf)
    env.step(WAIT)
    row = sink.of(EpochRow)[-1]
    assert (row.skipped_steps, row.skipped_batches) == (2, 1), (
        "skipped at scales 4 and 2; at 1 the seed is pruned"
    )
    assert stages_of(env)[1] == Stage.EMBARGOED


@pytest.mark.parametrize("amp", ["bfloat16", "float16"])
def test_environment_in_mixed_precision_continues_bit_for_bit_from_a_saved_state_with_its_loss_scales(
    amp: Amp,
) -> None:
    task = noisy_task(batches_per_epoch=3, horizon=12)
    ends = []
    env, _ = started(task, compute=Compute(DEFAULT_DEVICE, amp))
    run(env, PLAN, until=5)
    if amp == "float16":
        overflow_next(env, 0)
        env.step(WAIT)
    state = env.state()
    for one in (env, started(task, compute=Compute(DEFAULT_DEVICE, amp))[0]):
        one.load_state(state)
        run(one, {}, until=9)
        ends.append((host_bits(one), everything_in(one), bits(one.host.precision.state())))
    assert ends[0] == ends[1]
