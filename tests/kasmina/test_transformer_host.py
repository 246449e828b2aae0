"""The GPT host: causal, tied, in segments that slots can stand behind."""

import copy

import pytest
import torch
from torch import Tensor

from esper import MorphogeneticModel
from esper.kasmina.blueprints import names_for
from esper.kasmina.hosts import TransformerHost
from esper.leyline.errors import HostError

SIZES = {"vocabulary": 11, "context": 6, "width": 8, "layers": 3}


def tokens(count: int = 4, rng_seed: int = 0) -> Tensor:
    return torch.randint(11, (count, 6), generator=torch.Generator().manual_seed(rng_seed))


def host(**changes: object) -> TransformerHost:
    torch.manual_seed(0)
    return TransformerHost(**{**SIZES, **changes})  # type: ignore[arg-type]


def test_one_embedding_serves_input_and_output_of_a_host_and_of_its_copy() -> None:
    network = copy.deepcopy(host())
    [embedding] = [weight for weight in network.parameters() if weight.shape == (11, 8)]
    scores = MorphogeneticModel(network)(tokens())
    assert scores.shape == (4, 6, 11), "for every token at every place"
    assert MorphogeneticModel(network)(tokens()[:, :4]).shape == (4, 4, 11), "a shorter text fits as well"
    scores.sum().backward()
    assert embedding.grad is not None
    with torch.no_grad():
        embedding.zero_()
    assert not MorphogeneticModel(network)(tokens()).any()


@pytest.mark.parametrize("after", [(0,), (1, 1), (2,), (0, 2), (1, 2), (0, 1, 2)])
def test_slots_stand_after_any_layers_and_change_nothing_while_empty(after: tuple[int, ...]) -> None:
    network = host(slots_after=after)
    assert network.slot_config.num_slots == len(after)
    assert network.widths == (8,) * len(after)
    assert names_for("tokens") == MorphogeneticModel(network).action_space.blueprint_names
    torch.testing.assert_close(MorphogeneticModel(network)(tokens()), MorphogeneticModel(host())(tokens()))


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
def test_a_host_that_cannot_be_built_gets_a_sentence(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(HostError, match=sentence):
        host(**changes)
