"""Growth in depth by copying: what a copy takes over, and where there is nothing to copy."""

import pytest
import torch
from esper.kasmina.export import harvest, load_committed, save_committed
from torch import nn
from torch.optim import AdamW

from esper.kasmina.blueprints import blueprint_named
from esper.kasmina.hosts import CNNHost, Host, ResidualHost, TransformerHost
from esper.kasmina.network import MorphogeneticModel
from esper.leyline.errors import BlueprintError
from esper.leyline.factored_actions import Style
from esper.leyline.stages import Stage


def gpt(layers: int = 1) -> Host:
    return TransformerHost(vocabulary=16, context=6, width=8, layers=layers, slots_after=[layers - 1] * 3)


def residual() -> Host:
    return ResidualHost(8, blocks=2, slots=3, input_shape=(1, 8, 8), classes=4)


INPUTS = {gpt: torch.arange(24).view(4, 6) % 16, residual: torch.linspace(-1, 1, 256).view(4, 1, 8, 8)}
HOSTS = pytest.mark.parametrize("make", [gpt, residual])


def trained(make) -> tuple[MorphogeneticModel, AdamW]:
    """A model whose optimiser has moments: three steps of it."""
    torch.manual_seed(0)
    model = MorphogeneticModel(make())
    optimiser = AdamW(model.host.parameters(), lr=1e-2)
    model.bind_optimiser(optimiser)
    for _ in range(3):
        optimiser.zero_grad()
        model(INPUTS[make]).square().mean().backward()
        optimiser.step()
    return model, optimiser


def plant(model: MorphogeneticModel, slot: int, stage: Stage = Stage.FOSSILIZED) -> nn.Module:
    index = blueprint_named("stack", model.host.topology).index
    model.germinate(slot, index, Style.LINEAR_ADD)
    table = model.table
    table.blueprint[0, slot], table.stage[0, slot], table.alpha[0, slot] = index, stage, 1.0
    model.sync()
    seed = model.slot(slot).seed
    assert seed is not None
    return seed


def test_it_takes_the_lowest_index_that_each_topology_leaves_free():
    assert blueprint_named("stack", "tokens").index == 1
    assert blueprint_named("stack", "feature_map").index == 8


@HOSTS
def test_the_first_copy_repeats_the_last_block_of_the_trunk_with_its_moments(make):
    model, optimiser = trained(make)
    seed = plant(model, 0)
    original = model.host.original(0)
    for theirs, ours in zip(original.parameters(), seed.parameters(), strict=True):
        assert torch.equal(theirs, ours)
        assert theirs is not ours
        own = model.slot(0).optimiser.state[ours]
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimiser.state[theirs][name], own[name])
            assert optimiser.state[theirs][name] is not own[name]


@HOSTS
def test_at_full_alpha_the_network_goes_on_from_the_copied_block(make):
    model, _ = trained(make)
    plant(model, 0)
    h = model.host.segments[0](INPUTS[make])
    expected = model.host.original(0)(h)
    for segment in model.host.segments[1:]:
        expected = segment(expected)
    torch.testing.assert_close(model(INPUTS[make]), expected)


@HOSTS
def test_the_next_copy_repeats_the_nearest_one_upstream(make):
    model, _ = trained(make)
    first = plant(model, 0)
    with torch.no_grad():
        for weight in first.parameters():
            weight.add_(1.0)
    model.slot(0).optimiser.state.clear()  # moments of the trunk would be the wrong ones
    second = plant(model, 2)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not model.slot(2).optimiser.state


@HOSTS
def test_state_harvest_and_file_bring_a_copy_back(make, tmp_path):
    model, _ = trained(make)
    plant(model, 0)
    plant(model, 1)
    model.eval()
    expected = model(INPUTS[make])
    kept = model.state()
    model.remove(1)
    model.table.clear(0, 1)
    model.sync()
    assert not torch.equal(model(INPUTS[make]), expected)
    model.load_state(kept)
    assert torch.equal(model(INPUTS[make]), expected)
    torch.testing.assert_close(harvest(model)(INPUTS[make]), expected)
    save_committed(model, tmp_path)
    torch.testing.assert_close(load_committed(tmp_path)(INPUTS[make]), expected)


def test_where_nothing_can_be_copied_nobody_can_choose_it():
    model = MorphogeneticModel(CNNHost((4, 8), kernel=3, input_shape=(1, 8, 8), classes=4))
    model.bind_optimiser(AdamW(model.host.parameters()))
    index = blueprint_named("stack", "feature_map").index
    assert index not in model.action_space.blueprints
    with pytest.raises(BlueprintError, match=r"copies the last block upstream.*r0c0.*conv_light"):
        model.germinate(0, index, Style.LINEAR_ADD)
