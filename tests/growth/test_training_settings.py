"""Settings of the training in ``esper.grow``: scheduler, clipping, accumulation, autocast, metric, device."""

import os
import signal
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    LambdaLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.growth import Grown
from esper.growth.race_runners import PEAK, Runner
from esper.kasmina.optimizer_groups import present_rates
from esper.leyline.errors import EsperError
from tests.integration.training import forked

X = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] * X[:, 1] > 0).long()
PLAN = "mlp@0:1"


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def loader(batch_size: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), batch_size=batch_size)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).float().mean()


def grow(net: nn.Module, optimizer: Optimizer, **settings: Any) -> Grown:
    known = {"loss": cross_entropy, "epochs": 2, "controller": None, "show": lambda _: None} | settings
    return esper.grow(net, loader(16), loader(50), optimizer=optimizer, **known)


def constant(optimizer: Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda _epoch: 1.0)


def trained_by_hand(batch_size: int, clip: float = float("inf"), rate: float = 0.5) -> nn.Module:
    """Train the network for two epochs in a loop without Esper."""
    net = network()
    optimizer = SGD(net.parameters(), lr=rate)
    for _ in range(2):
        for x, y in loader(batch_size):
            optimizer.zero_grad()
            cross_entropy(net(x), y).backward()
            nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
    return net


def rates_of(optimizer: Optimizer) -> list[float]:
    """Return a list to which every optimiser step appends its learning rate."""
    rates: list[float] = []
    optimizer.register_step_post_hook(lambda own, *_: rates.append(own.param_groups[0]["lr"]))
    return rates


def broken_at(net: nn.Module, minibatch: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a loss that is NaN once, for the given minibatch of the training."""
    trained: list[bool] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        trained.extend([True] * net.training)
        is_broken = net.training and len(trained) == minibatch
        return cross_entropy(output, target) * (float("nan") if is_broken else 1.0)

    return loss


def one_cycle(highest: float, steps: int) -> list[float]:
    """Return the learning rates of a one-cycle schedule whose last step is not used."""
    optimizer = SGD(network().parameters(), lr=highest)
    scheduler, rates = OneCycleLR(optimizer, highest, total_steps=steps + 1), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


# --- accumulation and clipping ------------------------------------------------------------------------------


def test_accumulated_minibatches_train_like_one_larger_minibatch_also_at_the_end_of_an_epoch() -> None:
    # 100 samples are 7 minibatches, the last of 4 samples: two optimiser steps of 64 and of 36 samples.
    net = network()
    optimizer = SGD(net.parameters(), lr=0.5)
    rates = rates_of(optimizer)
    grow(net, optimizer, accumulate=4, scheduler=constant(optimizer))

    assert len(rates) == 4
    for ours, theirs in zip(net.parameters(), trained_by_hand(64).parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_mean_training_loss_with_accumulation_is_the_mean_over_minibatches() -> None:
    net = network()
    optimizer = SGD(net.parameters(), lr=0.0)
    wanted = [cross_entropy(net(x), y).item() for x, y in loader(16)]
    grown = grow(net, optimizer, accumulate=3)
    assert grown.epochs[1].train_loss == pytest.approx(sum(wanted) / 7)


def test_clipped_training_has_the_weights_of_a_loop_that_clips_by_the_norm_of_the_gradient() -> None:
    net = network()
    optimizer = SGD(net.parameters(), lr=0.5)
    grow(net, optimizer, clip=0.05, scheduler=constant(optimizer))

    clipped, unclipped = trained_by_hand(16, clip=0.05), trained_by_hand(16)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), clipped.parameters(), strict=True))
    assert not torch.equal(net[0].weight, unclipped[0].weight)


def test_incubating_seed_does_not_change_the_clipped_and_accumulated_steps_of_the_network() -> None:
    weights = []
    for controller in (None, PLAN):
        net = network()
        known = {"epochs": 4, "incubation_epochs": 4, "clip": 0.05, "accumulate": 3}
        grown = grow(net, SGD(net.parameters(), lr=0.5), controller=controller, **known)
        weights.append([p.clone() for p in grown.net.parameters()])
    assert [event.kind for event in grown.events] == ["germinated"]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_non_finite_loss_in_a_later_minibatch_of_a_step_changes_no_weight() -> None:
    net = network()
    before = deepcopy(net.state_dict())
    with pytest.raises(EsperError, match="the training loss is not finite in epoch 1"):
        grow(net, SGD(net.parameters(), lr=0.5), loss=broken_at(net, 3), accumulate=4)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


# --- scheduler ----------------------------------------------------------------------------------------------


def test_scheduler_is_stepped_after_every_epoch_and_keeps_its_rate_at_the_end() -> None:
    net = network()
    optimizer = SGD(net.parameters(), lr=0.5)
    rates = rates_of(optimizer)
    grow(net, optimizer, epochs=3, scheduler=StepLR(optimizer, 1, 0.5), controller=PLAN)
    assert rates == [0.5] * 7 + [0.25] * 7 + [0.125] * 7
    assert optimizer.param_groups[0]["lr"] == 0.0625


def test_scheduler_with_interval_step_is_stepped_after_every_optimiser_step() -> None:
    # 7 minibatches per epoch are 3 optimiser steps of up to 3 minibatches.
    net = network()
    optimizer = SGD(net.parameters(), lr=0.5)
    rates = rates_of(optimizer)
    cycle = {"scheduler": OneCycleLR(optimizer, 0.5, total_steps=7), "interval": "step"}
    grow(net, optimizer, accumulate=3, scheduler=cycle)
    assert rates == one_cycle(0.5, 6)


def test_reduce_on_plateau_reads_the_metric_of_the_epoch() -> None:
    net = network()
    optimizer = SGD(net.parameters(), lr=0.5)
    seen: list[float] = []

    class Reading(ReduceLROnPlateau):
        def step(self, metrics: Any, epoch: int | None = None) -> None:
            seen.append(float(metrics))
            super().step(metrics, epoch)

    grown = grow(net, optimizer, metric=accuracy, mode="max", scheduler=Reading(optimizer, "max"))
    assert seen == [epoch.metric for epoch in grown.epochs[1:]]


def test_training_after_a_rollback_continues_with_the_present_rate_of_the_scheduler() -> None:
    net = network()
    optimizer = SGD(net.parameters(), lr=0.1)
    rates = rates_of(optimizer)
    scheduler = StepLR(optimizer, 1, 0.5)
    grown = grow(net, optimizer, loss=broken_at(net, 30), epochs=7, scheduler=scheduler)
    assert [event.kind for event in grown.events] == ["rolled_back"]
    # Epoch 5 breaks at its second minibatch, and the weights of an earlier epoch return.
    assert rates == [0.1 * 0.5**epoch for epoch in (*(e for e in range(4) for _ in range(7)), 4)] + [
        0.1 * 0.5**epoch for epoch in (5, 6) for _ in range(7)
    ]


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "one cycle": lambda o: {"scheduler": OneCycleLR(o, 0.3, total_steps=16), "interval": "step"},
    "milestones": lambda o: MultiStepLR(o, [2, 4], 0.3),
    "plateau": lambda o: ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "constant": lambda o: ConstantLR(o, 0.1, total_iters=3),
}


def scheduled(scheduler: str, **settings: Any) -> tuple[Grown, float]:
    """Grow with accumulation, clipping and dropout; return the result and the last learning rate."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    known = {"epochs": 5, "controller": "mlp@0:2", "accumulate": 3, "clip": 0.5}
    grown = grow(net, optimizer, scheduler=SCHEDULERS[scheduler](optimizer), **(known | settings))
    return grown, optimizer.param_groups[0]["lr"]


def grow_and_die(out: Path, scheduler: str) -> None:
    """Kill this process when epoch 4 is printed, before the checkpoint of epoch 4 is written."""
    torch.set_num_threads(1)

    def show_and_die(line: str) -> None:
        if line.startswith("epoch 4:"):
            os.kill(os.getpid(), signal.SIGKILL)

    scheduled(scheduler, out=out, show=show_and_die)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_killed_training_with_scheduler_accumulation_and_clipping_resumes_bit_equal(
    tmp_path: Path, scheduler: str
) -> None:
    whole, rate = scheduled(scheduler)
    child = forked(grow_and_die, tmp_path / "run", scheduler)
    child.join()
    assert child.exitcode == -signal.SIGKILL
    resumed, its_rate = scheduled(scheduler, out=tmp_path / "run", resume=True)

    assert (resumed.epochs[1:], its_rate) == (whole.epochs[1:], rate)
    pairs = zip(resumed.net.parameters(), whole.net.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_resume_with_another_scheduler_or_clipping_is_refused(tmp_path: Path) -> None:
    scheduled("milestones", out=tmp_path / "run")
    for changed, words in (({"clip": 0.1}, "begun with clip=0.5"), ({"accumulate": 1}, "with accumulate=3")):
        with pytest.raises(EsperError, match=words):
            scheduled("milestones", out=tmp_path / "run", resume=True, **changed)
    with pytest.raises(EsperError, match="scheduler='MultiStepLR', and is to go on with 'ReduceLROnPlateau'"):
        scheduled("plateau", out=tmp_path / "run", resume=True)


def test_race_reads_the_present_rate_of_the_scheduler_as_its_highest_rate() -> None:
    net = network()
    optimizer = SGD(net.parameters(), lr=0.5)
    OneCycleLR(optimizer, 1.0, total_steps=10)
    group = optimizer.param_groups[0]
    group["lr"], before = 0.7, dict(group)
    with present_rates(optimizer):
        assert Runner.continued(net, optimizer).optimisers[0].param_groups[0][PEAK] == 0.7
    assert group["initial_lr"] == before["initial_lr"] == 0.04
    assert group["lr"] == 0.7


def test_race_leaves_the_rates_of_the_scheduler_unchanged() -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 24), nn.Linear(24, 2))
    x = torch.randn(2048, 8, generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(x, (x[:, 0].abs() > 0.67).long()), batch_size=32)
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    # OneCycleLR writes its start to "initial_lr", far below the present rate.
    cycle = OneCycleLR(optimizer, 5e-3, total_steps=20 * 64 + 1)
    rates = rates_of(optimizer)
    known = {"loss": cross_entropy, "optimizer": optimizer, "show": lambda _: None, "slots": "0"}
    grown = esper.grow(
        net, data, data, epochs=20, scheduler={"scheduler": cycle, "interval": "step"}, **known
    )

    assert grown.ledger.race > 0
    assert rates == one_cycle(5e-3, 20 * 64)


# --- autocast, metric, device -------------------------------------------------------------------------------


def test_amp_trains_under_autocast_and_validates_in_the_precision_of_the_network() -> None:
    net, seen = network(), set()
    net[0].register_forward_hook(lambda module, _args, output: seen.add((module.training, output.dtype)))
    grown = grow(net, SGD(net.parameters(), lr=0.5), amp=torch.bfloat16, controller=PLAN)
    assert (True, torch.bfloat16) in seen
    assert {dtype for training, dtype in seen if not training} == {torch.float32}
    assert {p.dtype for p in grown.net.parameters()} == {torch.float32}


def test_metric_measures_network_and_seeds_in_its_own_direction_and_the_loss_stays_known() -> None:
    net, lines = network(), []
    known = {"metric": accuracy, "mode": "max", "controller": f"keep:{PLAN}", "show": lines.append}
    grown = grow(net, SGD(net.parameters(), lr=0.5), **known)

    # Both validation batches have 50 samples, so means over batches are means over samples.
    output = grown.net.eval()(X)
    last = grown.epochs[-1]
    assert last.metric == pytest.approx(accuracy(output, Y).item())
    assert last.val_loss == pytest.approx(cross_entropy(output, Y).item())
    assert f"validation {last.val_loss:.4g}, metric {last.metric:.4g}" in lines[-1]
    assert f"metric           {grown.epochs[0].metric:.4g} → {last.metric:.4g}" in grown.summary()
    [seed] = [event for event in grown.events if event.kind == "measured"]
    hook = grown.net[0]._forward_hooks
    assert len(hook) == 1
    hook.clear()
    assert seed.contribution == pytest.approx(last.metric - accuracy(grown.net(X), Y).item(), abs=1e-6)


def test_run_directory_of_a_training_by_metric_has_losses_in_units_of_the_loss(tmp_path: Path) -> None:
    net = network()
    known = {"metric": accuracy, "mode": "max", "controller": PLAN, "out": tmp_path / "run"}
    grown = grow(net, SGD(net.parameters(), lr=0.5), **known)
    run = esper.open_run(tmp_path / "run")
    rows = run.rows(esper.leyline.rows.EpochRow)
    assert [row.val_loss for row in rows] == [epoch.val_loss for epoch in grown.epochs[1:]]
    assert run.rows(esper.leyline.rows.CounterfactualRow) == []


class Movable(nn.Sequential):
    """Network that records the devices to which it is moved, since this machine may have only one."""

    def __init__(self) -> None:
        super().__init__(*network())
        self.moves: list[Any] = []

    def to(self, *args: Any, **kwargs: Any) -> nn.Module:
        self.moves.append(args[0])
        return super().to(*args, **kwargs)


class Batch(Tensor):
    """Tensor that records the devices to which it is moved."""

    moves: list[Any]

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        self.moves.append(args[0])
        return self.as_subclass(Tensor).to(*args, **kwargs)


def test_device_moves_network_followed_copies_and_all_batches() -> None:
    net, x = Movable(), X.as_subclass(Batch)
    x.moves = []
    average, cpu = deepcopy(net), torch.device("cpu")
    known = {"loss": cross_entropy, "epochs": 1, "controller": None, "show": lambda _: None}
    esper.grow(net, [(x, Y)], [(x, Y)], device="cpu", follow=[average], **known)
    # The batch is read for the sample input, validated before the epoch, trained on, and validated.
    assert (net.moves, average.moves, x.moves) == ([cpu], [cpu], [cpu] * 4)


def test_refused_grow_moves_the_network_back_to_its_device() -> None:
    net = Movable()
    with pytest.raises(EsperError, match="unknown submodule of Movable"):
        grow(net, SGD(net.parameters(), lr=0.5), device="cpu", slots="missing")
    assert net.moves == [torch.device("cpu")] * 2


# --- refusals -----------------------------------------------------------------------------------------------

OTHER = SGD(network().parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"scheduler": {"scheduler": ReduceLROnPlateau(OTHER), "interval": "step"}},
            "^ReduceLROnPlateau reads the metric of an epoch; pass it with the interval 'epoch'$",
        ),
        (
            {"scheduler": OneCycleLR(OTHER, 0.1, total_steps=9)},
            r"^OneCycleLR usually counts optimiser steps; pass {'scheduler': OneCycleLR\(…\), 'interval': ",
        ),
        ({"clip": -1}, "^clip is -1; it must be a number above 0, the largest norm of the gradient$"),
        ({"clip": float("nan")}, "^clip is nan; it must be a number above 0"),
        ({"clip": "1"}, "^clip is '1'; it must be a number above 0"),
        ({"accumulate": 0}, "^accumulate is 0; it must be a whole number of minibatches per optimiser step"),
        ({"accumulate": 1.5}, "^accumulate is 1.5; it must be a whole number"),
        ({"amp": "fp8"}, "^amp is 'fp8' on cpu; pass torch.bfloat16, on a CUDA device also torch.float16,"),
        ({"amp": torch.float16}, "^amp is torch.float16 on cpu; pass torch.bfloat16"),
        (
            {"scheduler": StepLR},
            "^scheduler is StepLR; pass one of torch.optim.lr_scheduler, made from the o",
        ),
        (
            {"scheduler": StepLR(OTHER, 1)},
            "^scheduler is a StepLR of another optimiser; make it from the one",
        ),
        ({"scheduler": {"scheduler": None}}, "^scheduler is {'scheduler': None}; as a dict it must be {'sch"),
        (
            {"scheduler": {"scheduler": StepLR(OTHER, 1), "interval": "minute"}},
            "with the interval 'step' or 'epoch'$",
        ),
        (
            {"metric": accuracy},
            "^mode is missing; pass 'min' if the metric is a loss, 'max' if larger values",
        ),
        ({"metric": accuracy, "mode": "up"}, "^mode is 'up'; pass 'min' if the metric is a loss"),
        (
            {"metric": "accuracy", "mode": "max"},
            "^metric is str; pass a function that is called like the los",
        ),
        ({"mode": "max"}, "^mode is 'max' without a metric, and the loss is always minimised; pass metric="),
        ({"device": "gpu"}, r"^device is 'gpu', which cannot be used here \(Expected one of cpu"),
        ({"device": "meta"}, "^device is 'meta', which cannot be used here"),
        ({"device": "cuda"}, "^device is 'cuda', which cannot be used here"),
        ({"progress": "yes"}, "^progress is 'yes'; pass True, False, or None for a line in terminals only$"),
    ],
)
def test_grow_refuses_invalid_training_settings_and_changes_neither_network_nor_optimiser(
    settings: dict[str, Any], words: str
) -> None:
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    net = network()
    optimizer = SGD(net.parameters(), lr=0.5, momentum=0.9)
    weights, state = deepcopy(net.state_dict()), deepcopy(optimizer.state_dict())
    with pytest.raises(EsperError, match=words):
        grow(net, optimizer, **settings)
    assert list(net.state_dict()) == list(weights)
    assert all(torch.equal(value, weights[name]) for name, value in net.state_dict().items())
    assert optimizer.state_dict() == state
    grow(net, optimizer)


def test_scheduler_without_an_optimiser_is_refused() -> None:
    with pytest.raises(EsperError, match="scheduler is a StepLR of another optimiser"):
        esper.grow(
            network(), loader(16), loader(50), loss=cross_entropy, epochs=1, scheduler=StepLR(OTHER, 1)
        )


def test_metric_that_returns_no_number_is_refused_by_name() -> None:
    net = network()
    known = {"metric": lambda output, _target: output, "mode": "max"}
    with pytest.raises(
        EsperError, match=r"^metric must return one number, and returned a tensor of shape \(50"
    ):
        grow(net, SGD(net.parameters(), lr=0.5), **known)


def test_scheduler_is_unchanged_if_a_resumed_training_is_refused(tmp_path: Path) -> None:
    scheduled("milestones", out=tmp_path / "run")
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    scheduler = MultiStepLR(optimizer, [2, 4], 0.3)
    before = deepcopy(scheduler.state_dict())
    # The checkpoint has no state for a generator; this is found after the scheduler was loaded.
    other = DataLoader(TensorDataset(X, Y), batch_size=16, generator=torch.Generator())
    known = {"epochs": 5, "controller": "mlp@0:2", "accumulate": 3, "clip": 0.5, "loss": cross_entropy}
    known |= {"optimizer": optimizer, "scheduler": scheduler, "out": tmp_path / "run", "resume": True}
    with pytest.raises(EsperError, match="pass the network, optimizer and loaders that the run was begun"):
        esper.grow(net, other, loader(50), **known)
    assert scheduler.state_dict() == before
