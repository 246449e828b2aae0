"""GPT host: tied embedding, slots after any layer, and refused sizes."""

import copy

import pytest
import torch
from torch import Tensor

from esper import MorphogeneticModel
from esper.kasmina.blueprints import blueprint_names
from esper.kasmina.hosts import TransformerHost
from esper.leyline.errors import HostError

SIZES = {"vocabulary": 11, "context": 6, "width": 8, "layers": 3}


def tokens(count: int = 4, rng_seed: int = 0) -> Tensor:
    return torch.randint(11, (count, 6), generator=torch.Generator().manual_seed(rng_seed))


def host(**changes: object) -> TransformerHost:
    torch.manual_seed(0)
    return TransformerHost(**{**SIZES, **changes})  # type: ignore[arg-type]


def test_input_and_output_layers_of_a_gpt_host_share_one_embedding_even_after_deepcopy() -> None:
    network = copy.deepcopy(host())
    [embedding] = [weight for weight in network.parameters() if weight.shape == (11, 8)]
    scores = network(tokens())
    assert scores.shape == (4, 6, 11), "a score per position and token"
    assert network(tokens()[:, :4]).shape == (4, 4, 11), "a shorter text is allowed"
    scores.sum().backward()
    assert embedding.grad is not None
    with torch.no_grad():
        embedding.zero_()
    assert not network(tokens()).any()


@pytest.mark.parametrize("after", [(0,), (1, 1), (2,), (0, 2), (1, 2), (0, 1, 2)])
def test_empty_slots_after_any_layer_leave_the_output_of_the_gpt_host_unchanged(
    after: tuple[int, ...],
) -> None:
    network = host(slots_after=after)
    assert len(network.sites) == len(after)
    model = MorphogeneticModel(network)
    assert [site.width for site in model.sites] == [8] * len(after)
    assert blueprint_names(["tokens"]) == model.action_space.blueprint_names
    torch.testing.assert_close(model(tokens()), host()(tokens()))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"width": 10}, r"4 heads must divide the width; found a width of 10"),
        ({"vocabulary": 0}, r"needs positive vocabulary, .*; found 0, 6, 8, 3, 4, 4"),
        ({"slots_after": ()}, r"slots stand after layers 0 to 2, in order and at least one; found \[\]"),
        ({"slots_after": (2, 1)}, r"in order .* found \[2, 1\]"),
        ({"slots_after": (3,)}, r"found \[3\]"),
        ({"slots_after": (-1,)}, r"found \[-1\]"),
    ],
)
def test_gpt_host_refuses_impossible_sizes_and_slot_positions(
    changes: dict[str, object], sentence: str
) -> None:
    with pytest.raises(HostError, match=sentence):
        host(**changes)
