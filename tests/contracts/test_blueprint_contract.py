"""Contract tests of the built-in blueprints and of the blueprints in examples/, and tests of
``check_blueprint``."""

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
from tests.contracts.rules import check_contract, check_incubation, contract

# The import of own_blueprint.py registers its blueprints, but other tests expect only built-in blueprints.
unregister_blueprint("cross", "feature_map")
unregister_blueprint("remember", "tokens")

FEATURE_MAP = ["conv_light", "attention", "norm", "depthwise", "bottleneck", "conv_small", "conv_heavy"]
FEATURES = ["norm", "lora", "lora_large", "mlp_small", "mlp"]
TOKENS = ["attention", "norm", "lora", "lora_large", "mlp_small", "mlp", "flex_attention"]


@pytest.mark.parametrize("case", contract("feature_map") + contract("tokens") + contract("features"))
def test_seed_of_every_blueprint_follows_all_rules_for_seeds_in_every_host(case: Case) -> None:
    check_contract(case)


@pytest.mark.parametrize("style", range(4))
def test_stack_seed_follows_all_rules_for_seeds_except_zero_output_at_birth(style: int) -> None:
    check_contract(Case("stack", style, "tokens", 8), born_at_zero=False)


def test_contract_cases_contain_every_pair_of_values_of_blueprint_style_host_and_width() -> None:
    hosts = {
        "feature_map": {"images", "images_batch", "plain_images"},
        "tokens": {"tokens", "plain_tokens"},
        "features": {"features", "plain_features"},
    }
    for topology, names in (("feature_map", FEATURE_MAP), ("tokens", TOKENS), ("features", FEATURES)):
        assert [spec.name for spec in specs_for(topology) if not (spec.copies or spec.widens)] == names
        assert [spec.name for spec in specs_for(topology) if spec.copies] == ["stack"]
        assert [spec.name for spec in specs_for(topology) if spec.widens] == ["widen"]
        axes = (names, range(4), hosts[topology], (4, 8, 16, 32))
        cases = [parameter.values[0] for parameter in contract(topology)]
        rows = {(case.blueprint, case.style, case.kind, case.width) for case in cases}
        assert {row[:3] for row in rows} == set(product(*axes[:3]))
        for (i, one), (j, other) in combinations(enumerate(axes), 2):
            assert {(row[i], row[j]) for row in rows} == set(product(one, other))


# --- blueprints of users ----------------------------------------------------------------------


class Regularised(nn.Sequential):
    """Seed with batch normalisation and dropout; its last layer starts with zero weights, so that its first
    layers learn slowly.
    """

    def __init__(self, width: int, bias: bool = False) -> None:
        first, last = nn.Conv2d(width, width, 1, bias=bias), nn.Conv2d(width, width, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        super().__init__(first, nn.BatchNorm2d(width), nn.Dropout(0.5), last)


@pytest.mark.parametrize("case", contract("feature_map", ["cross"]) + contract("tokens", ["remember"]))
def test_seeds_of_the_example_blueprints_keep_the_contract_of_blueprints(case: Case) -> None:
    with registered("cross", own_blueprint.Cross), registered("remember", own_blueprint.Remember, "tokens"):
        check_contract(case)


@pytest.mark.parametrize("case", contract("feature_map", ["regularised"], widths=[4]))
def test_seed_with_batch_norm_and_dropout_keeps_the_contract_of_blueprints(case: Case) -> None:
    with registered("regularised", Regularised):
        check_contract(case, alive=False)


def test_check_contract_error_names_a_tensor_without_gradient() -> None:
    # Batch norm subtracts the bias of the preceding layer, so the gradient of that bias is exactly zero.
    case = Case("regularised", 0, "images", 8)
    dead = pytest.raises(AssertionError, match=r"dead \(incubating\): seed\.0\.bias")
    with registered("regularised", lambda width: Regularised(width, bias=True)), dead:
        check_incubation(case)


# --- check_blueprint --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "topology"), [("conv_heavy", "feature_map"), ("attention", "tokens"), ("mlp", "features")]
)
def test_check_blueprint_accepts_built_in_blueprints_and_leaves_the_random_state_unchanged(
    name: str, topology: Topology
) -> None:
    position = torch.get_rng_state()
    check_blueprint(name, topology, width=4)
    assert torch.equal(torch.get_rng_state(), position)


class Rectified(nn.Sequential):
    """Seed that cannot learn: it ends in a ReLU with input zero, whose gradient is zero."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, width), nn.ReLU())
        for weight in self.parameters():
            nn.init.zeros_(weight)


class Acausal(Mirrored):
    """Seed whose output at each token depends on all tokens."""

    def __init__(self, width: int) -> None:
        super().__init__(AddMean(), nn.Linear(width, width))


class AddMean(nn.Module):
    """Module that adds the mean over all tokens to the features of each token."""

    def forward(self, h: Tensor) -> Tensor:
        return h + h.mean(dim=1, keepdim=True)


def test_check_blueprint_error_names_tensors_without_gradient() -> None:
    sentence = (
        r"blueprint 'odd' is not alive at width 4 \(linear_add, TRAINING\): the second backward gives no"
        r" gradient worth the name to seed\.0\.weight, seed\.0\.bias\. Make it an esper\.kasmina\.Mirrored"
    )
    with registered("odd", Rectified, "tokens"), pytest.raises(BlueprintError, match=sentence):
        check_blueprint("odd", "tokens", width=4)


def test_check_blueprint_refuses_seeds_that_see_later_tokens_and_widths_that_do_not_fit() -> None:
    with registered("odd", Acausal, "tokens"):
        with pytest.raises(BlueprintError, match=r"blueprint 'odd' lets a token see later ones\. Mask them"):
            check_blueprint("odd", "tokens")
        check_blueprint("odd", "tokens", causal=False)
    with pytest.raises(
        BlueprintError, match="blueprint 'attention' needs a slot whose width is a multiple of 4"
    ):
        check_blueprint("attention", "tokens", width=6)
