"""The end of an epoch: what is measured, who decides, what is said."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from esper.growth import Growth, GrowthWarning
from esper.leyline import CANONICAL_ACTION, ActionSpace, EpochFacts, Head, LifecycleOp, SlotConfig, SlotTable
from esper.leyline.protocols import Decisions
from esper.tamiyo import HeuristicController, HeuristicSettings
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCritic
from esper.tamiyo.policy.controller import PolicyController
from esper.tamiyo.policy.features import get_feature_size
from esper.tamiyo.saturation_controller import SaturationController
from tests.growth.models import ResNet, mlp

X, Y = torch.randn(16, 5, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3


@pytest.fixture(autouse=True)
def _same_weights() -> None:
    torch.manual_seed(0)


def started(net: nn.Module | None = None, **known: Any) -> tuple[nn.Module, torch.optim.Optimizer, Growth]:
    net = net or mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    known = {"sample": X, "slots": ["0", "2"], "controller": None} | known
    return net, optimizer, Growth(net, optimizer, **known)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        nn.functional.cross_entropy(net(X), Y).backward()
        optimizer.step()
        optimizer.zero_grad()


def losses(net: nn.Module) -> Callable[[], list[float]]:
    """Four batches of four."""

    def evaluate() -> list[float]:
        net.eval()
        with torch.no_grad():
            return [nn.functional.cross_entropy(net(X[i::4]), Y[i::4]).item() for i in range(4)]

    return evaluate


def test_a_contribution_is_the_metric_without_the_seed_minus_that_with_it_and_has_a_paired_error() -> None:
    net, optimizer, growth = started(higher_is_better=False)
    growth.germinate("2", "mlp")
    train(net, optimizer)
    [event] = growth.end_epoch(losses(net))
    whole = torch.tensor(losses(net)())
    growth.set_alpha("2", 0.0)
    pairs = torch.tensor(losses(net)()) - whole
    assert (event.kind, event.slot, event.blueprint) == ("measured", "2", "mlp")
    assert event.contribution == pytest.approx(pairs.mean().item(), rel=1e-5)
    assert event.error == pytest.approx((pairs.std() / 2).item(), rel=1e-4)  # four batches
    assert str(event).startswith(f"epoch 1: mlp in 2 is worth {event.contribution:+.3g} ± {event.error:.2g}")


def test_one_number_has_no_error_bar_and_a_higher_metric_the_other_sign() -> None:
    net, optimizer, growth = started()
    growth.germinate("2", "mlp")
    train(net, optimizer)
    [event] = growth.end_epoch(lambda: -sum(losses(net)()) / 4)
    assert (event.error, event.contribution > 0, "±" in str(event)) == (None, True, False)


def test_measuring_leaves_modes_random_state_and_weights_as_after_one_evaluation() -> None:
    net, optimizer, growth = started()
    growth.germinate("2", "mlp")
    train(net, optimizer)
    net.train()
    net[4].eval()

    def evaluate() -> float:
        return net.eval()(X[torch.randperm(16)]).mean().item()

    before = torch.get_rng_state()
    evaluate()
    once = torch.get_rng_state()
    net.train()
    net[4].eval()
    torch.set_rng_state(before)
    state = {k: v.clone() for k, v in net.state_dict().items()}
    growth.end_epoch(evaluate)
    assert torch.equal(torch.get_rng_state(), once)
    assert [m.training for m in net] == [True, True, True, True, False]
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())


def test_at_most_four_seeds_are_switched_off_and_those_measured_longest_ago_come_first() -> None:
    net = nn.Sequential(*(nn.Linear(5, 5) for _ in range(7)))
    net, optimizer, growth = started(net, slots=[str(i) for i in range(6)])
    for slot in growth.slots:
        growth.germinate(slot, "norm")
    calls = []
    seen = []
    for _ in range(2):
        train(net, optimizer)
        events = growth.end_epoch(lambda: calls.append(1) or net(X).mean().item())
        seen.append([event.slot for event in events])
    assert len(calls) == 2 * (1 + 4)
    assert seen[0] == ["0", "1", "2", "3"]
    assert set(seen[1]) >= {"4", "5"}


# --- BatchNorm --------------------------------------------------------------------------------------


def test_batch_norm_without_calibration_is_called_uncalibrated() -> None:
    images = torch.randn(8, 1, 8, 8)
    net, optimizer, growth = started(ResNet(), sample=images, slots="layer2")
    growth.germinate("layer2", "conv_light")
    net(images).sum().backward()
    optimizer.step()
    [event] = growth.end_epoch(lambda: net.eval()(images).mean().item())
    assert "uncalibrated" in str(event)


def test_calibration_gives_each_network_statistics_of_its_own_and_puts_the_trained_ones_back() -> None:
    images, labels = torch.randn(8, 1, 8, 8), torch.zeros(8)
    batches = [(images[:4], labels[:4]), (images[4:], labels[4:])]
    net, optimizer, growth = started(ResNet(), sample=images, slots="layer1", calibrate=batches)
    growth.germinate("layer1", "conv_light")
    for _ in range(5):
        net.train()(images).square().mean().backward()
        optimizer.step()
    kept = net.layer2[0].bn1.running_mean.clone()

    def evaluate() -> float:
        return net.eval()(images).square().mean().item()

    def by_hand() -> float:
        """Statistics as BatchNorm makes them with a cumulative mean."""
        norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
        net.eval()
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None
            norm.train()
        with torch.no_grad():
            for x, _ in batches:
                net(x)
        return evaluate()

    [event] = growth.end_epoch(evaluate)
    assert torch.equal(net.layer2[0].bn1.running_mean, kept)
    whole = by_hand()
    growth.set_alpha("layer1", 0.0)
    assert event.contribution == pytest.approx(whole - by_hand(), rel=1e-4)
    assert "uncalibrated" not in str(event)


# --- who decides ------------------------------------------------------------------------------------


def test_a_plan_is_carried_out_by_the_names_of_submodules() -> None:
    net, optimizer, growth = started(controller="mlp@2:1,lora/half@0:2")
    said = []
    for _ in range(3):
        train(net, optimizer)
        said += [str(event) for event in growth.end_epoch(losses(net)) if event.kind != "measured"]
    assert said[:2] == [
        "epoch 1: mlp in 2 was planted (560 parameters)",
        "epoch 2: lora in 0 was planted (128 parameters)",
    ]
    assert said[2:] == ["epoch 3: mlp in 2 became permanent"]
    assert float(net[0].esper_slot.graft.alpha) == 0.5


class Stubborn:
    """Wants what cannot be."""

    name = "stubborn"

    def __init__(self, space: ActionSpace) -> None:
        self.space = space

    def reset(self, episode: int) -> None: ...

    def decide(self, facts: EpochFacts, table: SlotTable) -> Decisions:
        action = CANONICAL_ACTION.copy()
        action[[Head.OP, Head.SLOT]] = LifecycleOp.FOSSILIZE, 1
        return Decisions(action[None])


def test_a_wish_that_is_refused_is_told_and_changes_nothing() -> None:
    net, _, growth = started(controller=Stubborn)
    [event] = growth.end_epoch(lambda: 1.0)
    assert str(event) == "epoch 1: stubborn wanted FOSSILIZE in 2: legality, fossilize"
    assert len(list(net.parameters())) == 6


def test_the_heuristic_of_environments_works_as_it_is() -> None:
    net, optimizer, growth = started(
        controller=lambda space: HeuristicController(space, 1, HeuristicSettings(rotation=("mlp",)))
    )
    train(net, optimizer)
    [event] = growth.end_epoch(losses(net))
    assert (event.kind, event.blueprint) == ("germinated", "mlp")


def test_a_policy_works_as_it_is() -> None:
    def make(space: ActionSpace) -> PolicyController:
        return PolicyController(
            space, 1, FactoredRecurrentActorCritic(get_feature_size(SlotConfig.default()), 3)
        )

    net, optimizer, growth = started(controller=make, epochs=5)
    for _ in range(5):
        train(net, optimizer)
        growth.end_epoch(losses(net))
    assert growth.epoch == 5


def decisions(scores: list[float], **known: Any) -> list[int]:
    """Ops that the default controller chooses for these scores, in a network of one free slot."""
    net, _, growth = started(slots=["2"])
    growth.measure_epoch(losses(net))
    first = growth.facts
    controller = SaturationController(growth.network.action_space, **known)
    table = growth.network.table.copy()
    ops = []
    for epoch, score in enumerate(scores, start=1):
        facts = EpochFacts.stack([replace(first, val_score=score, val_loss=-score, cost=1.0)])
        facts.epoch[0] = epoch
        ops.append(int(controller.decide(facts, table).actions[0, Head.OP]))
    return ops


def test_the_default_plants_when_progress_has_levelled_off_on_any_scale() -> None:
    # 1 − 2^−t: after ten epochs the next doubling adds less than a tenth of what the first five did.
    rising = [1.0 - 0.5**t for t in range(1, 13)]
    straight = [float(t) for t in range(1, 13)]
    for scale, shift in ((1.0, 0.0), (100.0, -3.0), (1e-3, 7.0)):
        ops = decisions([scale * value + shift for value in rising])
        assert LifecycleOp.GERMINATE in ops
        assert ops.index(LifecycleOp.GERMINATE) >= 8
        assert LifecycleOp.GERMINATE not in decisions([scale * value + shift for value in straight])


def test_the_default_plants_nothing_that_could_no_longer_be_measured() -> None:
    assert LifecycleOp.GERMINATE not in decisions([1.0 - 0.5**t for t in range(1, 13)], epochs=12)


@pytest.mark.parametrize(("rise", "kept", "planted"), [(0.1, 2, 2), (0.0, 0, 2)])
def test_the_default_keeps_only_what_made_the_network_better_and_gives_up_after_two(
    rise: float, kept: int, planted: int
) -> None:
    """The metric is 1, and ``rise`` more for each seed; the network relies on all: without one it is 0.5."""
    net, optimizer, growth = started(controller="auto", slots=["0", "2"])
    kinds: list[str] = []
    for epoch in range(1, 40):
        train(net, optimizer, 1)
        level = 1.0 - 0.5 ** min(epoch, 8) - 1e-6 * epoch
        calls = iter([level + rise * kinds.count("germinated"), *[0.5] * 9])
        kinds += [event.kind for event in growth.end_epoch(lambda calls=calls: next(calls))]
    assert (kinds.count("fossilized"), kinds.count("germinated")) == (kept, planted)


def test_the_default_grows_a_network_that_is_too_small_and_keeps_what_helps() -> None:
    x, v = torch.randn(256, 2), torch.randn(256, 2)

    def labels(points: torch.Tensor) -> torch.Tensor:
        """Four quadrants and a ring: too much for three ReLUs."""
        return (points[:, 0] * points[:, 1] > 0).long() + (points.norm(dim=1) > 1.2).long()

    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    growth = Growth(net, optimizer, sample=x[:2], slots=["0", "2"], higher_is_better=False)
    said: list[str] = []
    for _ in range(40):
        for i in range(8):
            nn.functional.cross_entropy(net(x[i::8]), labels(x[i::8])).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            events = growth.end_epoch(
                lambda: [nn.functional.cross_entropy(net(v[i::8]), labels(v[i::8])).item() for i in range(8)]
            )
        said += [event.kind for event in events if event.kind != "measured"]
    assert said[:2] == ["germinated", "fossilized"]


# --- nothing stays unsaid ------------------------------------------------------------------------------


def test_a_seed_without_a_step_for_an_epoch_is_named() -> None:
    net, _, growth = started()
    other = torch.optim.SGD(net.parameters(), lr=0.1)
    growth.germinate("2", "mlp")
    train(net, other)  # the optimiser that Growth does not know
    with pytest.warns(
        GrowthWarning, match="epoch 1: mlp in 2 did not change: no gradient or no optimiser step"
    ):
        events = growth.end_epoch(losses(net))
    assert [event.kind for event in events] == ["warning", "measured"]


def test_a_metric_that_is_no_number_decides_nothing_and_one_that_never_moves_is_doubted() -> None:
    net, _, growth = started(controller="mlp@2:1")
    with pytest.warns(GrowthWarning, match="evaluate returned nan; nothing is decided on it"):
        growth.end_epoch(lambda: math.nan)
    assert len(list(net.parameters())) == 6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            growth.end_epoch(lambda: 0.5)
    with pytest.warns(GrowthWarning, match="evaluate returned the same 5 times; does it evaluate this"):
        growth.end_epoch(lambda: 0.5)


def test_a_metric_that_rests_with_the_learning_rate_is_not_doubted() -> None:
    _, optimizer, growth = started()
    growth.end_epoch(lambda: 0.5)
    optimizer.param_groups[0]["lr"] = 0.0009  # it was 0.1
    for _ in range(6):
        assert growth.end_epoch(lambda: 0.5) == []


def test_permanent_seeds_are_measured_when_asked_for() -> None:
    net, optimizer, growth = started()
    growth.germinate("2", "mlp")
    train(net, optimizer)
    growth.end_epoch(losses(net))
    growth.fossilize("2")
    train(net, optimizer)
    assert growth.end_epoch(losses(net)) == []
    [event] = growth.measure(losses(net))
    assert (event.kind, event.slot) == ("measured", "2")


def test_a_broken_seed_is_named() -> None:
    net, _, growth = started()
    growth.germinate("2", "mlp")
    with torch.no_grad():
        next(net[2].esper_slot.parameters()).fill_(np.nan)
    with pytest.warns(GrowthWarning) as told:
        growth.end_epoch(lambda: 1.0)
    assert any("mlp in 2 has weights that are not finite" in str(each.message) for each in told)


def test_seeds_of_a_frozen_network_train_alone_in_an_optimiser_with_an_empty_group() -> None:
    net = mlp().requires_grad_(False)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    optimizer = torch.optim.SGD([{"params": []}], lr=0.1)
    growth = Growth(net, optimizer, sample=X, slots=["0", "2"], controller=None)
    growth.germinate("0", "mlp")
    growth.germinate("2", "lora")
    train(net, optimizer)

    trained = [p for p in net.parameters() if p.requires_grad]
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in trained}
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in before.items())
    wanted = net(X)
    assert not torch.allclose(wanted, growth_free(before)(X))
    torch.testing.assert_close(growth.finish()(X), wanted, rtol=1e-4, atol=1e-5)


def growth_free(state: dict[str, torch.Tensor]) -> nn.Module:
    net = mlp()
    net.load_state_dict(state)
    return net
