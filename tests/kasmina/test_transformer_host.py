"""The GPT host: causal, tied, in segments that slots can stand behind."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from esper import MorphogeneticModel, harvest, load_committed
from esper.kasmina.blueprints import names_for, specs_for
from esper.kasmina.export import save_committed
from esper.kasmina.hosts import TransformerHost
from esper.kasmina.incubation import shadow_loss
from esper.leyline import NUM_STYLES, Stage, Style
from esper.leyline.errors import HostError
from esper.tolaria.objective import NEXT_TOKEN
from tests.tolaria.building import bits, set_stage, stir

SIZES = {"vocabulary": 11, "context": 6, "width": 8, "layers": 3}


def tokens(count: int = 4, rng_seed: int = 0) -> Tensor:
    return torch.randint(11, (count, 6), generator=torch.Generator().manual_seed(rng_seed))


def host(**changes: object) -> TransformerHost:
    torch.manual_seed(0)
    return TransformerHost(**{**SIZES, **changes})  # type: ignore[arg-type]


def model_with(blueprint: int, style: int, stage: Stage) -> MorphogeneticModel:
    """One seed in the middle slot, with weights that do something."""
    model = MorphogeneticModel(host())
    model.bind_optimiser(torch.optim.AdamW(model.host.parameters(), lr=0.01))
    model.germinate(1, blueprint, style)
    stir(model.slot(1))
    model.table.blueprint[0, 1], model.table.style[0, 1] = blueprint, style
    set_stage(model, 1, stage)
    return model


def test_the_output_is_a_score_for_every_token_at_every_place() -> None:
    assert MorphogeneticModel(host())(tokens()).shape == (4, 6, 11)
    assert MorphogeneticModel(host())(tokens()[:, :4]).shape == (4, 4, 11), "a shorter text fits as well"


def test_one_embedding_serves_input_and_output() -> None:
    network = host()
    assert sum(weight.shape == (11, 8) for weight in network.parameters()) == 1
    MorphogeneticModel(network)(tokens()).sum().backward()
    [embedding] = [weight for weight in network.parameters() if weight.shape == (11, 8)]
    assert embedding.grad is not None


@pytest.mark.parametrize("after", [(0,), (2,), (0, 2), (1, 2), (0, 1, 2)])
def test_slots_stand_after_any_layers_and_change_nothing_while_empty(after: tuple[int, ...]) -> None:
    network = host(slots_after=after)
    assert network.slot_config.num_slots == len(after)
    assert network.widths == (8,) * len(after)
    torch.testing.assert_close(MorphogeneticModel(network)(tokens()), MorphogeneticModel(host())(tokens()))


@pytest.mark.parametrize("style", range(NUM_STYLES))
@pytest.mark.parametrize("spec", specs_for("tokens"), ids=lambda spec: spec.name)
def test_no_token_sees_the_future_through_any_seed(spec: object, style: int) -> None:
    model = model_with(spec.index, style, Stage.HOLDING).eval()  # type: ignore[attr-defined]
    x, other = tokens(), tokens(rng_seed=1)
    with torch.no_grad():
        whole = model(x)
        for seen in range(1, 6):
            changed = model(torch.cat([x[:, :seen], other[:, seen:]], dim=1))
            torch.testing.assert_close(changed[:, :seen], whole[:, :seen], rtol=0, atol=1e-6)
            assert not torch.allclose(changed[:, seen:], whole[:, seen:])


def test_incubation_leaves_the_tied_embedding_a_parameter_and_every_bit_in_place() -> None:
    """Torch's functional call must put back what it swapped, also what has two names."""
    model = model_with(specs_for("tokens")[0].index, Style.LINEAR_ADD, Stage.TRAINING)
    before, count = bits(model.host.state_dict()), model.count_parameters()
    names = [name for name, _ in model.host.named_parameters()]
    for _ in range(3):
        model(tokens())
        shadow_loss(model, 1, tokens(rng_seed=1), NEXT_TOKEN.loss).backward()
    assert bits(model.host.state_dict()) == before
    assert model.count_parameters() == count
    assert [name for name, _ in model.host.named_parameters()] == names
    assert all(isinstance(weight, nn.Parameter) for weight in model.host.parameters())


def test_a_grown_network_is_harvested_saved_and_loaded(tmp_path: Path) -> None:
    model = model_with(specs_for("tokens")[0].index, Style.GATED_GATE, Stage.FOSSILIZED).eval()
    plain = harvest(model)
    save_committed(model, tmp_path)
    loaded = load_committed(tmp_path).eval()
    for network in (plain, loaded):
        torch.testing.assert_close(network(tokens()), model(tokens()))
    assert sum(p.numel() for p in loaded.parameters()) == sum(p.numel() for p in plain.parameters())


def test_a_copy_is_tied_to_itself() -> None:
    network = copy.deepcopy(host())
    [embedding] = [weight for weight in network.parameters() if weight.shape == (11, 8)]
    with torch.no_grad():
        embedding.zero_()
    assert not MorphogeneticModel(network)(tokens()).any()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"width": 10}, r"4 heads must divide the width; found a width of 10"),
        ({"vocabulary": 0}, r"needs positive vocabulary, .*; found 0, 6, 8, 3, 4, 4"),
        ({"slots_after": ()}, r"slots stand after layers 0 to 2, ascending and at least one; found \[\]"),
        ({"slots_after": (2, 1)}, r"ascending .* found \[2, 1\]"),
        ({"slots_after": (1, 1)}, r"ascending .* found \[1, 1\]"),
        ({"slots_after": (3,)}, r"found \[3\]"),
        ({"slots_after": (-1,)}, r"found \[-1\]"),
    ],
)
def test_a_host_that_cannot_be_built_gets_a_sentence(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(HostError, match=sentence):
        host(**changes)


def test_names_of_blueprints_are_those_for_tokens() -> None:
    assert names_for("tokens") == MorphogeneticModel(host()).action_space.blueprint_names
