"""Renewal mixes the matrices of trained blocks with fresh initial values when a block is planted."""

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from esper.kasmina.birth import Births
from esper.kasmina.blueprints import blueprint_named
from esper.kasmina.hosts import ResidualHost, TransformerHost
from esper.kasmina.network import MorphogeneticModel
from esper.kasmina.renewal import renew
from esper.leyline.errors import BlueprintError
from esper.leyline.factored_actions import Style
from tests.kasmina.test_stack import INPUTS, Make, gpt, residual, trained

HOSTS = pytest.mark.parametrize("make", [gpt, residual])


def values_of(model: MorphogeneticModel) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.host.named_parameters()}


def plant(model: MorphogeneticModel, births: Births, slot: int = 0) -> nn.Module:
    index = blueprint_named("stack", model.sites[slot].topology).index
    model.germinate(slot, index, Style.LINEAR_ADD, births)
    seed = model.slots[slot].seed
    assert seed is not None
    return seed


@HOSTS
def test_matrices_of_all_old_blocks_are_mixed_with_fresh_values_and_nothing_else_changes(make: Make) -> None:
    model, _ = trained(make)
    before = values_of(model)
    plant(model, Births(renew=0.6))
    after = values_of(model)
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    kind = type(model.host).block_kind
    assert kind is not None
    blocks = [path for path, module in model.host.named_modules() if type(module) is kind]
    old = [path for path in blocks if "esper_slot" not in path]
    matrices = {
        name for name, value in before.items() if name.startswith(tuple(old)) and value.ndim > 1
    }  # Norms and biases are vectors.
    assert changed == matrices != set()
    for name in matrices:  # What remains after the trained part is subtracted is fresh and of the usual size.
        fresh = (after[name] - 0.6 * before[name]) / 0.4
        fan = before[name][0].numel()
        assert 0.2 / fan**0.5 < fresh.std() < 2.0 / fan**0.5
        assert abs(torch.corrcoef(torch.stack([fresh.flatten(), before[name].flatten()]))[0, 1]) < 0.5


@HOSTS
def test_copy_keeps_the_trained_weights_when_its_source_is_renewed(make: Make) -> None:
    model, _ = trained(make)
    path = model.sites[0].block
    assert path is not None
    source = {name: p.detach().clone() for name, p in model.host.get_submodule(path).named_parameters()}
    copy = plant(model, Births(renew=0.6)).block
    assert all(torch.equal(p, source[name]) for name, p in copy.named_parameters())


@HOSTS
def test_side_copy_with_zeroed_output_projections_leaves_outputs_bit_equal_and_then_learns(
    make: Make,
) -> None:
    model, optimiser = trained(make)
    before = model(INPUTS[make])
    seed = plant(model, Births(zero=True))
    assert torch.equal(model(INPUTS[make]), before)
    first = [p.detach().clone() for p in seed.parameters()]
    for _ in range(2):
        optimiser.zero_grad()
        model(INPUTS[make]).square().mean().backward()
        optimiser.step()
    moved = [not torch.equal(p, was) for p, was in zip(seed.parameters(), first, strict=True)]
    assert all(moved)


def test_weights_stay_as_they_are_unless_a_renewal_is_asked_for() -> None:
    model, _ = trained(residual)
    before = values_of(model)
    plant(model, Births())
    assert all(torch.equal(value, values_of(model)[name]) for name, value in before.items())


def test_earlier_copies_are_renewed_with_the_blocks_of_the_host() -> None:
    model, _ = trained(gpt)
    first = plant(model, Births(), slot=0)
    was = [p.detach().clone() for p in first.parameters() if p.ndim > 1]
    plant(model, Births(renew=0.6), slot=1)
    assert not any(
        torch.equal(p, old) for p, old in zip((p for p in first.parameters() if p.ndim > 1), was, strict=True)
    )


@pytest.mark.parametrize("factor", [-0.1, 1.5, float("nan")])
def test_factor_outside_of_0_to_1_is_refused_and_nothing_is_planted(factor: float) -> None:
    model, optimiser = trained(residual)
    before, groups = values_of(model), len(optimiser.param_groups)
    with pytest.raises(BlueprintError, match="choose a factor from 0 to 1"):
        plant(model, Births(renew=factor))
    assert model.slots[0].seed is None
    assert len(optimiser.param_groups) == groups
    assert all(torch.equal(value, values_of(model)[name]) for name, value in before.items())


class Scaled(nn.Module):
    """Layer whose matrix has no method that initialises it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))


def test_network_without_a_method_for_fresh_values_is_refused_and_does_not_change() -> None:
    layer = Scaled()
    with pytest.raises(BlueprintError, match="reset_parameters"):
        renew([layer], 0.6)
    assert torch.equal(layer.weight, torch.eye(4))


def test_reset_of_a_residual_block_gives_kernels_the_spread_of_a_new_block() -> None:
    torch.manual_seed(0)
    host = ResidualHost(32, blocks=1, slots=1, input_shape=(1, 8, 8), classes=4)
    block = next(m for m in host.modules() if type(m) is ResidualHost.block_kind)
    kernel = block.change[2].weight
    spread = kernel.std().item()
    with torch.no_grad():
        kernel.zero_()
    block.reset_parameters()
    assert kernel.std().item() == pytest.approx(spread, rel=0.05)
    assert not block.change[2].bias.any()


def test_renewal_of_a_user_network_is_drawn_from_the_global_generator() -> None:
    def renewed() -> Tensor:
        torch.manual_seed(3)
        layer = nn.Linear(4, 4)
        renew([layer], 0.5)
        return layer.weight

    assert torch.equal(renewed(), renewed())


def test_moments_of_renewed_matrices_are_kept() -> None:
    model, optimiser = trained(gpt)
    assert isinstance(model.host, TransformerHost)
    assert isinstance(optimiser, AdamW)
    before = {p: optimiser.state[p]["exp_avg"].clone() for p in model.host_parameters()}
    plant(model, Births(renew=0.6))
    assert all(torch.equal(optimiser.state[p]["exp_avg"], value) for p, value in before.items())
