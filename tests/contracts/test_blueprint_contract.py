from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper import check_blueprint
from esper.kasmina import Mirrored
from esper.kasmina.blueprints import Topology, specs_for
from esper.leyline.errors import BlueprintError
from tests.contracts.matrix import Case, registered
from tests.contracts.rules import contract, is_alive

Check = Callable[[Case], None]
FEATURE_MAP = ["conv_light", "attention", "norm", "depthwise", "bottleneck", "conv_small", "conv_heavy"]
TOKENS = ["attention", "norm", "lora", "lora_large", "mlp_small", "mlp", "flex_attention"]


@pytest.mark.parametrize(("check", "case"), contract("feature_map"))
def test_every_blueprint_for_feature_maps(check: Check, case: Case) -> None:
    check(case)


@pytest.mark.parametrize(("check", "case"), contract("tokens"))
def test_every_blueprint_for_tokens(check: Check, case: Case) -> None:
    check(case)


def test_the_matrix_holds_every_blueprint_in_every_style_at_every_width_on_both_kinds_of_host() -> None:
    for topology, names in (("feature_map", FEATURE_MAP), ("tokens", TOKENS)):
        assert [spec.name for spec in specs_for(topology)] == names
        cells = [case for check, case in (p.values for p in contract(topology)) if "birth" in check.__name__]
        assert len(cells) == len(set(cells)) == 7 * 4 * 4 * 2
        assert {case.width for case in cells} == {4, 8, 16, 32}
        assert {case.blueprint for case in cells} == set(names)
        hosts = {"tokens": 2, "feature_map": 4}
        assert len({case.kind for case in cells}) == hosts[topology]


# --- a user's own blueprint -------------------------------------------------------------------


class Cross(Mirrored):
    """A column and a row."""

    def __init__(self, width: int) -> None:
        super().__init__(
            nn.Conv2d(width, width, (3, 1), padding=(1, 0)), nn.Conv2d(width, width, (1, 3), padding=(0, 1))
        )


class Recent(nn.Conv1d):
    """Each feature of the last three tokens, mixed."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, 3, groups=width)

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(F.pad(h.transpose(1, 2), (2, 0))).transpose(1, 2)


class Remember(Mirrored):
    def __init__(self, width: int) -> None:
        super().__init__(Recent(width), nn.Linear(width, width))


class Regularised(nn.Sequential):
    """Statistics and dropout of its own, so its last layer starts at zero and the others start slowly."""

    def __init__(self, width: int, bias: bool = False) -> None:
        first, last = nn.Conv2d(width, width, 1, bias=bias), nn.Conv2d(width, width, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        super().__init__(first, nn.BatchNorm2d(width), nn.Dropout(0.5), last)


@pytest.mark.parametrize(("check", "case"), contract("feature_map", ["cross"]))
def test_a_users_blueprint_for_feature_maps(check: Check, case: Case) -> None:
    with registered("cross", Cross):
        check(case)


@pytest.mark.parametrize(("check", "case"), contract("tokens", ["remember"]))
def test_a_users_blueprint_for_tokens(check: Check, case: Case) -> None:
    with registered("remember", Remember, "tokens"):
        check(case)


@pytest.mark.parametrize(
    ("check", "case"), contract("feature_map", ["regularised"], without=[is_alive], widths=[4])
)
def test_a_users_blueprint_with_statistics_and_dropout(check: Check, case: Case) -> None:
    with registered("regularised", Regularised):
        check(case)


def test_the_rule_of_life_finds_a_dead_tensor() -> None:
    # A bias in front of a batch norm is subtracted again: its gradient is zero by mathematics.
    case = Case("regularised", 0, "segmented", 8)
    dead = pytest.raises(AssertionError, match=r"dead \(incubating, rng seed 0\): seed\.0\.bias")
    with registered("regularised", lambda width: Regularised(width, bias=True)), dead:
        is_alive(case)


# --- the same for users, in one call ----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "topology"),
    [*((name, "feature_map") for name in FEATURE_MAP), *((name, "tokens") for name in TOKENS)],
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


def test_the_check_asks_for_causality_unless_told_otherwise() -> None:
    with registered("odd", Gossip, "tokens"):
        with pytest.raises(BlueprintError, match=r"blueprint 'odd' lets a token see later ones\. Mask them"):
            check_blueprint("odd", "tokens")
        check_blueprint("odd", "tokens", causal=False)


def test_the_check_refuses_what_germination_refuses() -> None:
    with pytest.raises(
        BlueprintError, match="blueprint 'attention' needs a slot whose width is a multiple of 4"
    ):
        check_blueprint("attention", "tokens", width=6)
