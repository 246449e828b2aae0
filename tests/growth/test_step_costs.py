"""Costs of the candidates of a race in measured seconds per training step."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import esper
from esper.growth import step_costs
from esper.growth.race_candidates import candidates_at
from esper.growth.race_runners import Candidate, Runner, frozen
from esper.growth.step_costs import StepCosts, least_seconds
from esper.kasmina.sites import find_sites
from esper.leyline import EsperError
from tests.growth.diagnosed import Net, features, loaders

BATCH = (torch.randn(32, 64), torch.randint(8, (32,)))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(F.relu(self.up(h)))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(Residual()), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


class Clock:
    """Clock that advances by the number of multiplications of linear layers, as if they took no less time."""

    def __init__(self) -> None:
        self.now = 0.0

    def count(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        if isinstance(module, nn.Linear):
            self.now += module.weight.numel()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(time, "process_time", lambda: made.now)
    hook = nn.modules.module.register_module_forward_hook(made.count)
    yield made
    hook.remove()


def candidates(net: nn.Module, *blueprints: str) -> list[Candidate]:
    host = frozen(net)
    sites = find_sites(host, "blocks.0", BATCH[0])
    return candidates_at(host, 1000.0, sites, {"features": blueprints}, BATCH[0])


def weigh(net: nn.Module, costs: StepCosts, *blueprints: str) -> tuple[list[Candidate], Runner, float]:
    control = Runner.continued(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    found = candidates(net, *blueprints)
    return found, control, costs.weigh(found, control, BATCH, F.cross_entropy)


def test_cost_of_a_candidate_is_the_time_that_it_adds_divided_by_the_time_of_a_step_without_it(
    clock: Clock,
) -> None:
    net = Blocks()
    [block], _, steps = weigh(net, StepCosts("seconds"), "stack")
    own, whole = 2 * 64 * 256, 2 * 64 * 256 + 64 * 8
    assert block.cost == pytest.approx(own / whole)
    # One untimed and five timed steps of the network without the block, and of the network with it.
    assert steps == pytest.approx(6 * (2 + own / whole))


def test_weighing_changes_neither_network_nor_optimiser_nor_candidates() -> None:
    net = Blocks()
    before = [p.clone() for p in net.parameters()]
    found, control, _ = weigh(net, StepCosts("seconds"), "stack", "widen", "mlp_small")
    assert all(map(torch.equal, before, net.parameters()))
    assert all(map(torch.equal, before, control.net.parameters()))
    assert not control.optimisers[0].state
    assert [each.runner for each in found] == [None] * 3
    assert all(p.grad is None for each in found for p in each.graft.parameters())


def test_candidate_that_was_measured_before_is_not_measured_again(clock: Clock) -> None:
    net, costs = Blocks(), StepCosts("seconds")
    [first], _, _ = weigh(net, costs, "stack")
    [second], _, steps = weigh(net, StepCosts(**vars(costs)), "stack")
    assert (second.cost, steps) == (first.cost, 0.0)


def test_candidate_of_a_network_that_has_grown_is_measured_again(clock: Clock) -> None:
    costs, deeper = StepCosts("seconds"), Blocks()
    weigh(Blocks(), costs, "stack")
    deeper.blocks.append(Residual())
    [block], _, _ = weigh(deeper, costs, "stack")
    assert block.cost == pytest.approx(2 * 64 * 256 / (4 * 64 * 256 + 64 * 8))


def test_flops_stay_the_cost_of_a_candidate_if_they_are_requested_or_the_network_is_frozen() -> None:
    for net, unit in ((Blocks(), "flops"), (Blocks().requires_grad_(False), "seconds")):
        costs, found = StepCosts(unit), candidates(net, "mlp_small")  # type: ignore[arg-type]
        assert costs.weigh(found, Runner.control(net, 1e-3), BATCH, F.cross_entropy) == 0.0
        assert (costs.unit, found[0].cost) == ("flops", found[0].flops / 1000)


def test_other_work_between_rounds_does_not_change_the_least_seconds() -> None:
    spent = iter([0.0] * 2 + [3e-2, 0.0] * 4 + [0.0] * 2)

    def work() -> None:
        until = time.process_time() + 5e-3 + next(spent)
        while time.process_time() < until:
            pass

    one, other = least_seconds([work, work], torch.device("cpu"))
    assert one == pytest.approx(5e-3, rel=0.3)
    assert other == pytest.approx(5e-3, rel=0.3)


def test_coarse_clock_of_cpu_time_is_replaced_by_wall_clock_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_costs, "COARSE", 0.0)
    assert least_seconds([lambda: time.sleep(0.01)], torch.device("cpu"))[0] >= 0.01


@pytest.mark.parametrize(("cost", "shown"), [("seconds", "seconds"), ("flops", "FLOPs")])
def test_diagnosis_states_the_unit_of_its_costs(cost: str, shown: str) -> None:
    train, val = loaders(features)
    found = esper.diagnose(
        Net(),
        train,
        val,
        loss=F.mse_loss,
        steps=300,
        slots="second",
        blueprints=["lora"],
        cost=cost,  # type: ignore[arg-type]
    )
    assert found.cost == cost
    assert f"weighed by {shown}" in str(found)
    assert found.rows[0].cost is not None
    assert (found.rows[0].cost == found.rows[0].flops / (2 * (5 * 8 + 8 * 8 + 8 * 2))) == (cost == "flops")


def test_diagnose_and_grow_refuse_an_unknown_unit_of_costs_with_one_sentence() -> None:
    train, val = loaders(features)
    for call in (
        lambda: esper.diagnose(Net(), train, val, loss=F.mse_loss, cost="watts"),  # type: ignore[arg-type]
        lambda: esper.grow(Net(), train, val, loss=F.mse_loss, epochs=1, cost="watts"),  # type: ignore[arg-type]
    ):
        with pytest.raises(EsperError, match=r"^cost is 'watts'; pass 'seconds'"):
            call()
