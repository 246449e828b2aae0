"""``Growth.end_epoch``: measured contributions, actions of controllers, and warnings."""

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
from esper.leyline.errors import BlueprintError
from esper.leyline.signals import Decisions
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
    known = {"sample": X, "mode": "max", "slots": ["0", "2"], "controller": None} | known
    return net, optimizer, Growth(net, optimizer, **known)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        nn.functional.cross_entropy(net(X), Y).backward()
        optimizer.step()
        optimizer.zero_grad()


def losses(net: nn.Module) -> Callable[[], list[float]]:
    """Return a function that computes the loss of the network on each of four batches."""

    def evaluate() -> list[float]:
        net.eval()
        with torch.no_grad():
            return [nn.functional.cross_entropy(net(X[i::4]), Y[i::4]).item() for i in range(4)]

    return evaluate


def test_contribution_is_the_loss_without_the_seed_minus_the_loss_with_it_and_has_a_paired_error() -> None:
    net, optimizer, growth = started(mode="min")
    growth.germinate("2", "mlp")
    train(net, optimizer)
    [event] = growth.end_epoch(losses(net))
    whole = torch.tensor(losses(net)())
    growth.set_alpha("2", 0.0)
    pairs = torch.tensor(losses(net)()) - whole
    assert (event.kind, event.slot, event.blueprint) == ("measured", "2", "mlp")
    assert event.contribution == pytest.approx(pairs.mean().item(), rel=1e-5)
    # The standard error of a mean over four batches is their standard deviation divided by √4 = 2.
    assert event.error == pytest.approx((pairs.std() / 2).item(), rel=1e-4)
    assert str(event).startswith(f"epoch 1: mlp in 2 is worth {event.contribution:+.3g} ± {event.error:.2g}")


def test_contribution_has_no_error_if_the_metric_is_a_single_number() -> None:
    net, optimizer, growth = started()
    growth.germinate("2", "mlp")
    train(net, optimizer)
    [event] = growth.end_epoch(lambda: -sum(losses(net)()) / 4)
    assert (event.error, event.contribution > 0, "±" in str(event)) == (None, True, False)


def test_end_epoch_keeps_train_modes_and_weights_and_draws_the_random_numbers_of_one_evaluation() -> None:
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


def test_end_epoch_measures_at_most_four_seeds_and_prefers_those_measured_longest_ago() -> None:
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


@pytest.mark.parametrize("is_planted", [False, True])
def test_batch_norm_network_is_evaluated_once_per_epoch_and_once_more_for_a_seed(is_planted: bool) -> None:
    images = torch.randn(8, 1, 8, 8)
    net, optimizer, growth = started(ResNet(), sample=images, slots="layer1", calibrate=[images])
    if is_planted:
        growth.germinate("layer1", "conv_light")
    net(images).sum().backward()
    optimizer.step()
    calls, drawn = [], torch.get_rng_state()

    def evaluate() -> float:
        calls.append(float(torch.rand(())))
        return float(net(images).detach().mean())

    growth.end_epoch(evaluate)
    assert len(calls) == 1 + is_planted
    assert len(set(calls)) == 1
    after = torch.rand(())
    torch.set_rng_state(drawn)
    assert torch.rand(()) == calls[0]
    assert torch.rand(()) == after  # The random state is that after a single evaluation.


def test_contribution_in_a_network_with_batch_norm_is_marked_uncalibrated_without_calibration_data() -> None:
    images = torch.randn(8, 1, 8, 8)
    net, optimizer, growth = started(ResNet(), sample=images, slots="layer2")
    growth.germinate("layer2", "conv_light")
    net(images).sum().backward()
    optimizer.step()
    [event] = growth.end_epoch(lambda: net.eval()(images).mean().item())
    assert "uncalibrated" in str(event)


def test_calibration_recomputes_batch_norm_statistics_for_measuring_and_then_restores_them() -> None:
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
        """Set the BatchNorm statistics to the means over the batches, and return the metric."""
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


# --- controllers ------------------------------------------------------------------------------------


def test_plan_controller_plants_seeds_in_slots_given_by_names_of_submodules() -> None:
    net, optimizer, growth = started(controller="mlp@2:1,lora/half@0:2", mode="min")
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
    """Controller that always chooses an illegal action."""

    name = "stubborn"

    def __init__(self, space: ActionSpace) -> None:
        self.space = space

    def reset(self, episode: int) -> None: ...

    def decide(self, facts: EpochFacts, table: SlotTable) -> Decisions:
        action = CANONICAL_ACTION.copy()
        action[[Head.OP, Head.SLOT]] = LifecycleOp.FOSSILIZE, 1
        return Decisions(action[None])


def test_refused_action_of_a_controller_is_reported_and_leaves_the_network_unchanged() -> None:
    net, _, growth = started(controller=Stubborn)
    [event] = growth.end_epoch(lambda: 1.0)
    assert str(event) == "epoch 1: stubborn wanted FOSSILIZE in 2: legality, fossilize"
    assert len(list(net.parameters())) == 6


def test_heuristic_controller_plants_a_seed_in_a_users_network() -> None:
    net, optimizer, growth = started(
        controller=lambda space: HeuristicController(space, 1, HeuristicSettings(rotation=("mlp",)))
    )
    train(net, optimizer)
    [event] = growth.end_epoch(losses(net))
    assert (event.kind, event.blueprint) == ("germinated", "mlp")


def test_policy_controller_runs_for_five_epochs_on_a_users_network() -> None:
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
    """Return the op that the default controller chooses after each score, in a network with one free slot."""
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


def test_default_controller_plants_a_seed_when_the_score_levels_off_for_any_scale_of_the_score() -> None:
    # The score after epoch t is 1 − 2^−t, so ten more epochs after epoch 10 would add less than a tenth of
    # the gain of the first five epochs.
    rising = [1.0 - 0.5**t for t in range(1, 13)]
    straight = [float(t) for t in range(1, 13)]
    for scale, shift in ((1.0, 0.0), (100.0, -3.0), (1e-3, 7.0)):
        ops = decisions([scale * value + shift for value in rising])
        assert LifecycleOp.GERMINATE in ops
        assert ops.index(LifecycleOp.GERMINATE) >= 8
        assert LifecycleOp.GERMINATE not in decisions([scale * value + shift for value in straight])


def test_default_controller_plants_no_seed_if_too_few_epochs_are_left_to_measure_it() -> None:
    assert LifecycleOp.GERMINATE not in decisions([1.0 - 0.5**t for t in range(1, 13)], epochs=12)


def test_default_controller_plants_no_seed_while_each_doubling_of_compute_adds_the_same_progress() -> None:
    assert LifecycleOp.GERMINATE not in decisions([math.log2(t) for t in range(1, 61)])


def test_default_controller_plants_no_seed_in_the_last_third_of_the_training() -> None:
    scores = [float(min(t, 14)) for t in range(1, 31)]
    planted = decisions(scores).index(LifecycleOp.GERMINATE) + 1
    assert decisions(scores, epochs=math.ceil(1.5 * planted))[planted - 1] == LifecycleOp.GERMINATE
    assert LifecycleOp.GERMINATE not in decisions(scores, epochs=30)


@pytest.mark.parametrize(("lead", "kind"), [(0.0, "pruned"), (0.1, "fossilized")])
def test_default_controller_removes_a_seed_that_only_continues_the_trend(lead: float, kind: str) -> None:
    """Use a metric that rises by 0.01 per doubling of the epochs, and by ``lead`` when a seed is planted."""
    net, optimizer, growth = started(controller="auto", slots=["2"])
    kinds: list[str] = []
    for epoch in range(1, 25):
        train(net, optimizer, 1)
        level = 1.0 - 0.5 ** min(epoch, 8) + 0.01 * math.log2(epoch)
        calls = iter([level + lead * kinds.count("germinated"), *[0.5] * 9])
        kinds += [event.kind for event in growth.end_epoch(lambda calls=calls: next(calls))]
    assert [each for each in kinds if each != "measured"] == ["germinated", kind]


@pytest.mark.parametrize(("rise", "kept", "planted"), [(0.1, 2, 2), (0.0, 0, 1)])
def test_default_controller_fossilizes_seeds_that_raise_the_metric_and_stops_after_one_that_does_not(
    rise: float, kept: int, planted: int
) -> None:
    """Use a metric that rises by ``rise`` per planted seed and is 0.5 with a seed switched off."""
    net, optimizer, growth = started(controller="auto", slots=["0", "2"])
    kinds: list[str] = []
    for epoch in range(1, 40):
        train(net, optimizer, 1)
        level = 1.0 - 0.5 ** min(epoch, 8) - 1e-6 * epoch
        calls = iter([level + rise * kinds.count("germinated"), *[0.5] * 9])
        kinds += [event.kind for event in growth.end_epoch(lambda calls=calls: next(calls))]
    assert (kinds.count("fossilized"), kinds.count("germinated")) == (kept, planted)


def test_default_controller_plants_and_fossilizes_a_seed_in_a_network_that_is_too_small() -> None:
    x, v = torch.randn(256, 2), torch.randn(256, 2)

    def labels(points: torch.Tensor) -> torch.Tensor:
        """Return the class of each point by quadrant and radius; no linear map separates the classes."""
        return (points[:, 0] * points[:, 1] > 0).long() + (points.norm(dim=1) > 1.2).long()

    net = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    growth = Growth(net, optimizer, sample=x[:2], slots=["0", "1"], mode="min")
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


# --- warnings ------------------------------------------------------------------------------


def test_end_epoch_warns_of_a_seed_whose_weights_did_not_change_in_the_epoch() -> None:
    net, _, growth = started()
    other = torch.optim.SGD(net.parameters(), lr=0.1)
    growth.germinate("2", "mlp")
    # The optimiser ``other`` does not hold the parameters of the seed, unlike that passed to ``Growth``.
    train(net, other)
    with pytest.warns(
        GrowthWarning, match="epoch 1: mlp in 2 did not change: no gradient or no optimiser step"
    ):
        events = growth.end_epoch(losses(net))
    assert [event.kind for event in events] == ["warning", "measured"]


def test_end_epoch_warns_once_of_each_seed_that_does_not_change_also_after_its_state_was_loaded() -> None:
    net, _, growth = started()
    kinds = []
    for slot in ("0", "2"):
        growth.germinate(slot, "mlp")
        with pytest.warns(GrowthWarning, match=f"mlp in {slot} did not change: .* or bind\\(\\); otherwise"):
            kinds.append([event.kind for event in growth.end_epoch(losses(net))])
    growth.load_state_dict(growth.state_dict())
    kinds.append([event.kind for event in growth.end_epoch(losses(net))])
    assert kinds == [["warning", "measured"], ["warning", "measured", "measured"], ["measured"] * 2]


@pytest.mark.parametrize("metric", [math.nan, math.inf, -math.inf, [1.0, math.inf], [math.inf, -math.inf]])
def test_end_epoch_warns_of_a_metric_that_is_not_finite_and_decides_and_measures_nothing(metric: Any) -> None:
    net, optimizer, growth = started(controller="mlp@2:1", shapley=True)
    growth.germinate("0", "mlp")
    train(net, optimizer)
    with (
        np.errstate(all="raise"),
        pytest.warns(GrowthWarning, match="a value that is not finite; nothing is decided on it"),
    ):
        [event, _] = growth.end_epoch(lambda: metric)
    report = growth.reports()[0]
    assert len(list(net.parameters())) == 6 + len(list(net[0].esper_slot.parameters()))
    assert event.contribution is not None
    assert math.isnan(event.contribution)
    assert (report.counterfactual_contribution, report.shapley_value) == (None, None)


def test_end_epoch_warns_of_a_metric_that_is_constant_for_five_epochs() -> None:
    _, _, growth = started()
    growth.end_epoch(lambda: 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            growth.end_epoch(lambda: 0.5)
    with pytest.warns(GrowthWarning, match="evaluate returned the same 5 times; does it evaluate this"):
        growth.end_epoch(lambda: 0.5)


def test_end_epoch_does_not_warn_of_a_constant_metric_at_a_small_learning_rate() -> None:
    _, optimizer, growth = started()
    growth.end_epoch(lambda: 0.5)
    optimizer.param_groups[0]["lr"] = 0.0009  # The learning rate is below 1 % of its initial value 0.1.
    for _ in range(6):
        assert growth.end_epoch(lambda: 0.5) == []


def test_fossilized_seeds_are_measured_by_the_method_measure_but_not_by_end_epoch() -> None:
    net, optimizer, growth = started()
    growth.germinate("2", "mlp")
    train(net, optimizer)
    growth.end_epoch(losses(net))
    growth.fossilize("2")
    train(net, optimizer)
    assert growth.end_epoch(losses(net)) == []
    [event] = growth.measure(losses(net))
    assert (event.kind, event.slot) == ("measured", "2")


def test_end_epoch_warns_of_a_seed_with_nan_weights() -> None:
    net, _, growth = started()
    growth.germinate("2", "mlp")
    with torch.no_grad():
        next(net[2].esper_slot.parameters()).fill_(np.nan)
    with pytest.warns(GrowthWarning) as told:
        growth.end_epoch(lambda: 1.0)
    assert any("mlp in 2 has weights that are not finite" in str(each.message) for each in told)


def test_seeds_of_a_frozen_network_are_added_to_an_empty_parameter_group_of_the_optimiser() -> None:
    net = mlp().requires_grad_(False)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    optimizer = torch.optim.SGD([{"params": []}], lr=0.1)
    growth = Growth(net, optimizer, sample=X, slots=["0", "2"], controller=None, mode="max")
    growth.germinate("0", "mlp")
    growth.germinate("2", "lora")
    train(net, optimizer)

    trained = [p for p in net.parameters() if p.requires_grad]
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in trained}
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in before.items())
    wanted = net(X)
    without = mlp()
    without.load_state_dict(before)
    assert not torch.allclose(wanted, without(X))
    torch.testing.assert_close(growth.finish()(X), wanted, rtol=1e-4, atol=1e-5)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.outer(self.inner(h).relu())


def test_growth_with_named_blueprints_plants_no_other_and_runs_no_trials_for_it() -> None:
    def growth_of(blueprints: list[str] | None) -> tuple[Growth, int]:
        net, calls = nn.Sequential(nn.Linear(5, 8), Block(), nn.Linear(8, 3)), list[object]()
        net.register_forward_hook(lambda *_: calls.append(None))
        _, _, growth = started(net, slots=["1"], blueprints=blueprints)
        return growth, len(calls)

    (every, most), (wide, fewer), (side, fewest) = map(growth_of, (None, ["mlp", "widen"], ["mlp"]))
    assert fewest < fewer < most
    sites = [growth.network.sites[0] for growth in (every, wide, side)]
    assert [site.insertion is not None for site in sites] == [True, False, False]
    assert [site.pair is not None for site in sites] == [True, True, False]
    space = wide.network.action_space
    assert {space.blueprint_names[index] for index in space.blueprints} == {"mlp", "widen"}
    with pytest.raises(
        BlueprintError, match=r"^blueprint 'norm' is not one .*, mlp; name it in blueprints=$"
    ):
        side.germinate("1", "norm")
    assert side.germinate("1", "mlp").kind == "germinated"


def test_state_with_hidden_units_is_refused_by_a_growth_without_blueprint_widen() -> None:
    _, _, grown = started()
    grown.germinate("0", "widen")
    _, _, growth = started(blueprints=["mlp"])
    with pytest.raises(BlueprintError, match="slot 0 has no pair of layers for them: none of the blueprints"):
        growth.load_state_dict(grown.state_dict())
    assert not growth.network.table.occupied.any()


def test_parameter_order_of_the_optimiser_is_restored_when_a_state_with_other_seeds_is_loaded() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(net.parameters())
    known = {"sample": torch.randn(2, 5), "slots": ["0", "2", "4"], "mode": "min", "controller": None}
    growth = Growth(net, optimizer, **known)

    def order() -> list[str]:
        names = {id(p): name for name, p in net.named_parameters()}
        return [names[id(p)] for p in optimizer.param_groups[0]["params"]]

    growth.germinate("2", "norm")
    before, state = order(), growth.state_dict()
    growth.prune("2")
    growth.germinate("2", "mlp_small")
    growth.germinate("4", "mlp_small")
    growth.load_state_dict(state)
    assert order() == before == [name for name, _ in net.named_parameters()]
