from itertools import combinations, product

import pytest
import torch
from torch import Tensor, nn

from esper import check_blueprint
from esper.kasmina import Mirrored
from esper.kasmina.blueprints import Topology, specs_for, unregister_blueprint
from esper.leyline.errors import BlueprintError
from examples import own_blueprint
from tests.contracts.matrix import Case, registered
from tests.contracts.rules import contract, incubates, keeps_the_contract

# The example registers them for the whole process; here they are known only where they are tested.
unregister_blueprint("cross", "feature_map")
unregister_blueprint("remember", "tokens")

FEATURE_MAP = ["conv_light", "attention", "norm", "depthwise", "bottleneck", "conv_small", "conv_heavy"]
FEATURES = ["norm", "lora", "lora_large", "mlp_small", "mlp"]
TOKENS = ["attention", "norm", "lora", "lora_large", "mlp_small", "mlp", "flex_attention"]


@pytest.mark.parametrize("case", contract("feature_map") + contract("tokens") + contract("features"))
def test_every_blueprint(case: Case) -> None:
    keeps_the_contract(case)


@pytest.mark.parametrize("style", range(4))
def test_a_copy_keeps_the_contract_but_for_zero_at_birth(style: int) -> None:
    keeps_the_contract(Case("stack", style, "tokens", 8), born_at_zero=False)


def test_every_two_of_blueprint_style_host_and_width_meet() -> None:
    hosts = {"feature_map": {"images", "images_batch"}, "tokens": {"tokens"}, "features": {"features"}}
    for topology, names in (("feature_map", FEATURE_MAP), ("tokens", TOKENS), ("features", FEATURES)):
        assert [spec.name for spec in specs_for(topology) if not spec.copies] == names
        assert [spec.name for spec in specs_for(topology) if spec.copies] == ["stack"]
        axes = (names, range(4), hosts[topology], (4, 8, 16, 32))
        cases = [parameter.values[0] for parameter in contract(topology)]
        rows = {(case.blueprint, case.style, case.kind, case.width) for case in cases}
        for (i, one), (j, other) in combinations(enumerate(axes), 2):
            assert {(row[i], row[j]) for row in rows} == set(product(one, other))


# --- a user's own blueprint -------------------------------------------------------------------


class Regularised(nn.Sequential):
    """Statistics and dropout of its own, so its last layer starts at zero and the others start slowly."""

    def __init__(self, width: int, bias: bool = False) -> None:
        first, last = nn.Conv2d(width, width, 1, bias=bias), nn.Conv2d(width, width, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        super().__init__(first, nn.BatchNorm2d(width), nn.Dropout(0.5), last)


@pytest.mark.parametrize("case", contract("feature_map", ["cross"]) + contract("tokens", ["remember"]))
def test_the_examples_blueprints(case: Case) -> None:
    with registered("cross", own_blueprint.Cross), registered("remember", own_blueprint.Remember, "tokens"):
        keeps_the_contract(case)


@pytest.mark.parametrize("case", contract("feature_map", ["regularised"], widths=[4]))
def test_a_users_blueprint_with_statistics_and_dropout(case: Case) -> None:
    with registered("regularised", Regularised):
        keeps_the_contract(case, alive=False)


def test_the_rule_of_episode_finds_a_dead_tensor() -> None:
    # A bias in front of a batch norm is subtracted again: its gradient is zero by mathematics.
    case = Case("regularised", 0, "images", 8)
    dead = pytest.raises(AssertionError, match=r"dead \(incubating, shadow\): seed\.0\.bias")
    with registered("regularised", lambda width: Regularised(width, bias=True)), dead:
        incubates(case, "shadow")


# --- the same for users, in one call ----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "topology"), [("conv_heavy", "feature_map"), ("attention", "tokens"), ("mlp", "features")]
)
def test_built_in_blueprints_pass_the_check(name: str, topology: Topology) -> None:
    position = torch.get_rng_state()
    check_blueprint(name, topology, width=4)
    assert torch.equal(torch.get_rng_state(), position)


class Rectified(nn.Sequential):
    """Zero at birth and for ever: no gradient passes a ReLU of zeros."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, width), nn.ReLU())
        for weight in self.parameters():
            nn.init.zeros_(weight)


class Gossip(Mirrored):
    """Every token hears of all."""

    def __init__(self, width: int) -> None:
        super().__init__(Everyone(), nn.Linear(width, width))


class Everyone(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h + h.mean(dim=1, keepdim=True)


def test_the_check_names_what_is_dead_and_where() -> None:
    sentence = (
        r"blueprint 'odd' is not alive at width 4 \(linear_add, TRAINING\): the second backward gives no"
        r" gradient worth the name to seed\.0\.weight, seed\.0\.bias\. Make it an esper\.kasmina\.Mirrored"
    )
    with registered("odd", Rectified, "tokens"), pytest.raises(BlueprintError, match=sentence):
        check_blueprint("odd", "tokens", width=4)


def test_the_check_asks_for_causality_unless_told_otherwise_and_for_a_width_that_fits() -> None:
    with registered("odd", Gossip, "tokens"):
        with pytest.raises(BlueprintError, match=r"blueprint 'odd' lets a token see later ones\. Mask them"):
            check_blueprint("odd", "tokens")
        check_blueprint("odd", "tokens", causal=False)
    with pytest.raises(
        BlueprintError, match="blueprint 'attention' needs a slot whose width is a multiple of 4"
    ):
        check_blueprint("attention", "tokens", width=6)
