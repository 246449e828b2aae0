"""Tests of the parts of a race: paired loss differences, the learning-rate schedule, the training of the
control, and first-order (gradient) scores."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from esper.growth.batch_training import endless
from esper.growth.diagnose import DIAGNOSIS
from esper.growth.race import Race
from esper.growth.race_candidates import candidates_at
from esper.growth.race_runners import Limit, Probe, Runner, frozen, grafted, share_of_rate
from esper.growth.step_costs import StepCosts
from esper.kasmina.blueprints import blueprint_named
from esper.kasmina.graft import SideGraft
from esper.kasmina.sites import find_sites
from esper.leyline.factored_actions import Style
from tests.growth.diagnosed import Net, features, loaders


def test_mean_difference_of_losses_weights_validation_chunks_by_their_number_of_samples() -> None:
    probe = Probe([(torch.zeros(1, 1), torch.zeros(1)), (torch.zeros(3, 1), torch.zeros(3))], F.mse_loss)
    # The loss differences 4 and 0 have the weights 1/4 and 3/4, so their weighted mean is 1. The standard
    # error of this mean is the square root of 2·((3·1/4)² + (1·3/4)²) = 2.25.
    difference = probe.paired(torch.tensor([5.0, 2.0]), torch.tensor([1.0, 2.0]))
    assert difference == pytest.approx((1.0, 1.5))


def test_learning_rate_rises_in_the_first_fifth_of_a_heat_of_a_race_and_then_falls_to_zero() -> None:
    assert [round(share_of_rate(step, 10), 3) for step in range(10)] == [
        0.5, 1.0, 0.889, 0.778, 0.667, 0.556, 0.444, 0.333, 0.222, 0.111,
    ]  # fmt: skip


def test_controls_of_a_race_train_for_the_given_number_of_steps_per_candidate_step() -> None:
    net = Net()
    train, val = loaders(features)
    batches = endless(train, torch.device("cpu"), "train_loader")
    race = Race(net, None, F.mse_loss, list(val), batches, Limit(600), DIAGNOSIS, StepCosts())
    made = race.train([], steps=4, control_steps=1.5, reserve=0.0)
    assert (made, [control.steps for control in race.controls]) == (4, [6, 6, 6])


def test_copy_of_an_optimiser_with_a_scheduler_trains_the_copied_network_and_not_the_original() -> None:
    """Copy an optimiser whose method ``step`` a scheduler has replaced by one bound to the original."""
    net = nn.Linear(5, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    # The scheduler sets the learning rate of the original optimiser to 0; its initial learning rate is 0.1.
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.0)
    before = copy.deepcopy(net.state_dict())
    runner = Runner.continued(net, optimizer)
    runner.step((torch.ones(3, 5), torch.ones(3, 2)), F.mse_loss, 1.0)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert not torch.equal(runner.net.weight, net.weight)  # type: ignore[arg-type]


def test_candidate_seed_joined_to_a_copy_of_the_race_control_trains_jointly_with_the_copy() -> None:
    torch.manual_seed(0)
    net, batch = nn.Linear(5, 2), (torch.randn(8, 5), torch.randn(8, 2))
    [site] = find_sites(net := nn.Sequential(net), "0", batch[0])
    control = Runner.control(net, 1e-2)
    graft = SideGraft(site, blueprint_named("lora", "features"), Style.LINEAR_ADD, net)
    seed = Runner.candidate(frozen(net), site, graft, 1e-2)
    for runner in (control, seed):
        runner.step(batch, F.mse_loss, 1.0)
    joint = seed.joined(control)
    kept = copy.deepcopy((control.net.state_dict(), graft.state_dict()))
    moments = control.optimisers[0].state[control.net[0].weight]["step"].item()  # type: ignore[index]
    joint.step(batch, F.mse_loss, 1.0)
    assert not torch.equal(joint.net[0].weight, control.net[0].weight)  # type: ignore[index]
    assert joint.optimisers[1].state[joint.net[0].weight]["step"].item() == moments + 1  # type: ignore[index]
    for before, after in zip(kept, (control.net.state_dict(), graft.state_dict()), strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_first_order_score_of_a_candidate_is_the_slope_of_the_validation_loss() -> None:
    torch.manual_seed(0)
    net, (train, val) = Net().double().eval(), loaders(features)
    double = lambda batch: tuple(tensor.double() for tensor in batch)  # noqa: E731
    held_out = [double(batch) for batch in val]
    race = Race(
        net,
        None,
        F.mse_loss,
        held_out,
        map(double, endless(train, torch.device("cpu"), "")),
        Limit(60),
        DIAGNOSIS,
        StepCosts(),
    )
    sample = race.training[0][0]
    sites = find_sites(race.host, "second", sample)
    race.candidates = candidates_at(race.host, race.host_flops, sites, {"features": ["lora"]}, sample)
    race.score_first_order()
    [each] = race.candidates
    # The expected slope is the change of the validation loss in a small step against the training gradient.
    graft, step, every = each.graft, 1e-6, max(1, len(race.probe.parts) // 6)
    held = Probe(race.probe.parts[::every], F.mse_loss)
    host = frozen(net).eval()
    with grafted(host, each.site, graft):
        at_birth = held.losses(host).mean()
        graft.zero_grad()
        sum(F.mse_loss(host(x), y) for x, y in race.training).backward()  # type: ignore[union-attr]
        norm = torch.cat([p.grad.flatten() for p in graft.parameters()]).norm()
        with torch.no_grad():
            for p in graft.parameters():
                p.sub_(step * p.grad / norm)
        slope = (at_birth - held.losses(host).mean()) / step
    assert each.first_order == pytest.approx(float(slope), rel=1e-3)


def run_race(
    optimizer: type[torch.optim.Optimizer], rate: float, blueprints: tuple[str, ...] = ("lora", "mlp_small")
) -> Race:
    torch.manual_seed(0)
    net, (train, val) = Net(), loaders(features)
    batches, optimiser = endless(train, torch.device("cpu"), ""), optimizer(net.parameters(), lr=rate)  # type: ignore[call-arg]
    race = Race(net, optimiser, F.mse_loss, list(val), batches, Limit(600), DIAGNOSIS, StepCosts())
    sites, sample = find_sites(race.host, "*", race.training[0][0]), race.training[0][0]
    race.candidates = candidates_at(race.host, race.host_flops, sites, {"features": blueprints}, sample)
    assert race.run()
    return race


@pytest.mark.parametrize(
    "blueprints", [("norm",), ("lora", "mlp_small")], ids=["cheap candidates", "expensive candidates"]
)
def test_last_heat_of_a_race_trains_network_and_candidate_jointly_against_a_control_of_equal_compute(
    blueprints: tuple[str, ...],
) -> None:
    race = run_race(torch.optim.Adam, 1e-3, blueprints)
    assert len(race.candidates) == 2
    assert all(each.runner and each.runner.net is not race.host for each in race.candidates)
    assert all(each.runner is None or each.runner.net is race.host for each in race.out)
    costliest = 1 + max(each.cost for each in race.candidates)
    # The control of the race trains for 30 steps in the first heat. In the second heat it makes up to three
    # times as many steps as a candidate, until its compute equals 150 steps of the most expensive candidate.
    assert race.controls[0].steps == 30 + int(min(3.0, (150 * costliest - 30) / 120) * 120)


def test_race_candidates_are_not_trained_jointly_with_a_control_that_diverged() -> None:
    race = run_race(torch.optim.SGD, 1e30)
    assert race.control is None
    assert all(each.runner and each.runner.net is race.host for each in race.candidates)
    assert all(each.change and torch.isfinite(torch.tensor(each.change.mean)) for each in race.candidates)
