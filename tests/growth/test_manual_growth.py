"""Shapley values on request, and network files saved by ``Growth.save`` before ``finish``."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import esper
from esper.growth import Growth
from tests.growth.models import CASES, mlp

X, Y = torch.randn(16, 5, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3


def trained(**settings: Any) -> tuple[nn.Module, Growth]:
    """Return a network with two trained seeds, and its ``Growth`` object."""
    torch.manual_seed(0)
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    known = {"slots": ["0", "2"], "controller": None, "mode": "min"}
    growth = Growth(net, optimizer, sample=X, **(known | settings))
    growth.germinate("0", "mlp")
    growth.germinate("2", "lora")
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(X), Y).backward()
        optimizer.step()
    return net, growth


def evaluation(net: nn.Module) -> Callable[[], list[float]]:
    """Return a function that computes the loss of the network on each of four batches."""
    return lambda: [nn.functional.cross_entropy(net(X[i::4]), Y[i::4]).item() for i in range(4)]


def gain_of_both_seeds(net: nn.Module, growth: Growth) -> float:
    """Return the score of the network minus its score with both seeds off; the score is the negative loss."""
    with_seeds = sum(evaluation(net)()) / 4
    for slot in growth.slots:
        growth.set_alpha(slot, 0.0)
    without = sum(evaluation(net)()) / 4
    for slot in growth.slots:
        growth.set_alpha(slot, 1.0)
    return without - with_seeds


def test_shapley_values_are_reported_by_end_epoch_and_sum_to_the_joint_gain_of_the_seeds() -> None:
    net, growth = trained(shapley=True)
    events = growth.end_epoch(evaluation(net))

    values = [event.shapley for event in events]
    assert [event.kind for event in events] == ["measured", "measured"]
    assert f"Shapley value {values[0]:+.3g}" in str(events[0])
    assert sum(values) == pytest.approx(gain_of_both_seeds(net, growth), rel=1e-6)
    assert [report.shapley_value for report in growth.reports()] == pytest.approx(values)
    # The interaction of two seeds is their joint gain minus the gains of the first and the second seed alone.
    first, second = (report.interaction_sum for report in growth.reports())
    assert first == pytest.approx(second)
    gains = [event.contribution for event in events]
    assert sum(gains) - first == pytest.approx(sum(values), rel=1e-6)


def test_growth_computes_shapley_values_only_if_requested() -> None:
    net, growth = trained()
    events = growth.end_epoch(evaluation(net))
    assert [event.shapley for event in events] == [None, None]
    # The method end_epoch has measured all seeds in this epoch already.
    assert growth.measure(evaluation(net)) == []

    calls = []
    events = growth.measure(lambda: calls.append(1) or evaluation(net)(), shapley=True)
    assert len(calls) == 4  # Two seeds have four on/off configurations.
    values = [event.shapley for event in events]
    assert sum(values) == pytest.approx(gain_of_both_seeds(net, growth), rel=1e-6)
    assert [report.shapley_value for report in growth.reports()] == pytest.approx(values)


def test_summary_has_parameters_and_seconds_and_one_line_per_slot_with_the_values_of_its_seed() -> None:
    net, growth = trained(shapley=True)
    growth.end_epoch(evaluation(net))
    growth.prune("0")
    top, heading, first, second = growth.summary().splitlines()
    # The network has 5 · 8 + 8 · 8 + 8 · 3 weights and 8 + 8 + 3 biases, the lora seed 2 · 8 · 8 weights.
    size = "Sequential with 275 parameters, 128 of them in seeds"
    assert top == f"epoch 1: {size}; measure {growth.ledger.seconds['measure']:.3g} s"
    assert repr(growth) == f"Growth({size}, 2 slots, epoch 1)"
    assert heading.split("  ")[:2] == ["slot", "stage"]
    assert first.split() == ["0", "EMBARGOED", *["–"] * 6]
    seed = growth.reports()[1]
    measured = (seed.counterfactual_contribution, seed.contribution_error, seed.shapley_value)
    worth, error, shapley = (f"{value:.{digits}g}" for value, digits in zip(measured, (3, 2, 3), strict=True))
    assert second.split() == ["2", "HOLDING", "lora", "1", "128", "1", worth, "±", error, shapley]
    assert len({len(line) for line in (heading, first, second)}) == 1


def test_sampled_shapley_values_of_five_seeds_sum_to_their_joint_gain() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(5, 5) for _ in range(6)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    slots = [str(index) for index in range(5)]
    growth = Growth(net, optimizer, sample=X, slots=slots, controller=None, mode="max")
    for slot in slots:
        growth.germinate(slot, "norm")
    for _ in range(3):
        net(X).square().mean().backward()
        optimizer.step()

    def evaluate() -> float:
        return -net(X).square().mean().item()

    before = torch.get_rng_state()
    events = growth.measure(evaluate, shapley=True)
    assert torch.equal(torch.get_rng_state(), before)
    with_seeds = evaluate()
    for slot in slots:
        growth.set_alpha(slot, 0.0)
    assert sum(event.shapley for event in events) == pytest.approx(with_seeds - evaluate(), rel=1e-5)


# --- files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "gru", "dict"])
def test_network_saved_by_growth_is_loaded_as_a_plain_network_with_equal_outputs(
    name: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    net, sample = case.build(), case.sample()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    slots = [slot for slot, _ in case.seeds]
    growth = Growth(net, optimizer, sample=sample, slots=slots, controller=None, mode="max")
    for slot, (_, blueprint) in zip(growth.slots, case.seeds, strict=True):
        growth.germinate(slot, blueprint, alpha=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        case.tensor(net(sample)).square().mean().backward()
        optimizer.step()
    growth.save(tmp_path / "grown.pt")
    base = case.build()
    loaded = esper.load(tmp_path / "grown.pt", base=base)

    assert loaded is base
    assert torch.equal(case.tensor(loaded.eval()(sample)), case.tensor(net.eval()(sample)))
    assert not any("esper" in type(module).__module__ for module in loaded.modules())
    # Seeds can still be pruned after ``Growth.save``.
    growth.prune(growth.slots[0])


def test_file_saved_by_growth_contains_weights_but_neither_sample_input_nor_optimiser_state(
    tmp_path: Path,
) -> None:
    net = mlp()
    sample = torch.randn(4096, 5)
    optimizer = torch.optim.Adam(net.parameters())
    growth = Growth(net, optimizer, sample=sample, slots="2", controller=None, mode="max")
    growth.germinate("2", "mlp")
    net(sample).sum().backward()
    optimizer.step()
    growth.save(tmp_path / "grown.pt")

    weights = io.BytesIO()
    torch.save(net.state_dict(), weights)
    # Names of slots and classes add some hundred bytes to the file; the sample input would add 80,000 bytes.
    assert (tmp_path / "grown.pt").stat().st_size < weights.tell() + 2_000
