"""The ``stack`` blueprint copies a block of the host with its weights and optimiser state."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from esper.kasmina import harvest, load
from esper.kasmina.blueprints import blueprint_named
from esper.kasmina.hosts import CNNHost, Host, ResidualHost, TransformerHost
from esper.kasmina.network import MorphogeneticModel
from esper.kasmina.network_file import save
from esper.leyline.errors import BlueprintError
from esper.leyline.factored_actions import Style
from esper.leyline.stages import Stage


def gpt(layers: int = 1) -> Host:
    return TransformerHost(vocabulary=16, context=6, width=8, layers=layers, slots_after=[layers - 1] * 3)


def residual() -> Host:
    return ResidualHost(8, blocks=2, slots=3, input_shape=(1, 8, 8), classes=4)


Make = Callable[[], Host]
INPUTS = {gpt: torch.arange(24).view(4, 6) % 16, residual: torch.linspace(-1, 1, 256).view(4, 1, 8, 8)}
HOSTS = pytest.mark.parametrize("make", [gpt, residual])


def trained(make: Make) -> tuple[MorphogeneticModel, AdamW]:
    """Return a network trained for three steps, and its AdamW optimiser with the moments of these steps."""
    torch.manual_seed(0)
    model = MorphogeneticModel(make())
    optimiser = AdamW(model.host.parameters(), lr=1e-2)
    model.bind_optimiser(optimiser)
    for _ in range(3):
        optimiser.zero_grad()
        model(INPUTS[make]).square().mean().backward()
        optimiser.step()
    return model, optimiser


def plant(model: MorphogeneticModel, slot: int) -> nn.Module:
    """Plant a ``stack`` seed, a copy of a block, at full alpha and return the seed."""
    index = blueprint_named("stack", model.sites[slot].topology).index
    model.germinate(slot, index, Style.LINEAR_ADD)
    table = model.table
    table.blueprint[0, slot], table.stage[0, slot], table.alpha[0, slot] = index, Stage.FOSSILIZED, 1.0
    model.sync()
    seed = model.slot(slot).seed
    assert seed is not None
    return seed


def block_before(model: MorphogeneticModel, slot: int) -> nn.Module:
    """Return the host's block that a ``stack`` seed in ``slot`` copies."""
    path = model.sites[slot].block
    assert path is not None
    return model.host.get_submodule(path)


def host_weights(block: nn.Module) -> list[Tensor]:
    """Return the parameters of ``block`` without those of a seed planted inside the block."""
    return [weight for name, weight in block.named_parameters() if "esper_slot" not in name.split(".")]


def test_stack_blueprint_has_the_lowest_free_action_index_of_each_topology() -> None:
    assert blueprint_named("stack", "tokens").index == 1
    assert blueprint_named("stack", "feature_map").index == 8


@HOSTS
def test_first_stack_seed_has_weights_and_optimiser_moments_of_the_block_before_its_slot(make: Make) -> None:
    model, optimiser = trained(make)
    seed = plant(model, 0)
    original = block_before(model, 0)
    for theirs, ours in zip(host_weights(original), seed.parameters(), strict=True):
        assert torch.equal(theirs, ours)
        assert theirs is not ours
        own = optimiser.state[ours]
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimiser.state[theirs][name], own[name])
            assert optimiser.state[theirs][name] is not own[name]


@HOSTS
def test_stack_seed_at_full_alpha_replaces_features_by_the_output_of_the_copied_block(make: Make) -> None:
    model, _ = trained(make)
    plant(model, 0)
    with model.taking_part(model.without(0)):
        h = model.host.segments[0](INPUTS[make])
        expected = block_before(model, 0)(h)
        for segment in model.host.segments[1:]:
            expected = segment(expected)
    torch.testing.assert_close(model(INPUTS[make]), expected)


@HOSTS
def test_stack_seed_copies_the_nearest_stack_seed_upstream_instead_of_a_block_of_the_host(make: Make) -> None:
    model, optimiser = trained(make)
    first = plant(model, 0)
    with torch.no_grad():
        for weight in first.parameters():
            weight.add_(1.0)
            # The test removes the optimiser moments of the first stack seed, so the second stack seed must
            # have none.
            del optimiser.state[weight]
    second = plant(model, 2)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not any(weight in optimiser.state for weight in second.parameters())


@HOSTS
def test_stack_seed_has_the_same_output_after_load_state_harvest_and_loading_a_file(
    make: Make, tmp_path: Path
) -> None:
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
    save(model.host, tmp_path / "network.pt")
    torch.testing.assert_close(load(tmp_path / "network.pt").eval()(INPUTS[make]), expected)


def test_stack_is_not_selectable_in_a_host_without_blocks() -> None:
    model = MorphogeneticModel(CNNHost((4, 8), kernel=3, input_shape=(1, 8, 8), classes=4))
    model.bind_optimiser(AdamW(model.host.parameters()))
    index = blueprint_named("stack", "feature_map").index
    assert index not in model.action_space.blueprints
    with pytest.raises(BlueprintError, match=r"copies the last block upstream.*r0c0.*conv_light"):
        model.germinate(0, index, Style.LINEAR_ADD)
