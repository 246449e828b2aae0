from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina import MorphogeneticModel, register_blueprint
from esper.kasmina.blueprints import names_for, specs_for, unregister_blueprint
from esper.leyline.errors import BlueprintError, SlotError, UnknownNameError
from tests.contracts.matrix import (
    SLOT,
    Case,
    begin,
    blueprint_cases,
    build_host,
    germinate,
    planted,
    registered,
)
from tests.contracts.rules import RULES, is_alive


@pytest.mark.parametrize("case", blueprint_cases())
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_blueprint_keeps(rule: Callable[[Case], None], case: Case) -> None:
    rule(case)


def test_the_matrix_holds_every_registered_blueprint() -> None:
    names = {"norm", "conv_small", "depthwise", "conv_light", "conv_heavy"}
    assert {spec.name for spec in specs_for("feature_map")} == names
    assert len(blueprint_cases()) == 5 * 4 * 2 * 3


# --- a user's own blueprint -------------------------------------------------------------------


class Regularised(nn.Sequential):
    """What a user would write: statistics and dropout of its own, zero at birth."""

    def __init__(self, width: int, bias: bool = False) -> None:
        first, last = nn.Conv2d(width, width, 1, bias=bias), nn.Conv2d(width, width, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        super().__init__(first, nn.BatchNorm2d(width), nn.Dropout(0.5), last)


@pytest.mark.parametrize("case", blueprint_cases(["regularised"], styles=[0, 3], widths=[8]))
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule is not is_alive])
def test_a_users_blueprint_keeps(rule: Callable[[Case], None], case: Case) -> None:
    with registered("regularised", Regularised):
        rule(case)


def test_the_rule_of_life_finds_a_dead_tensor() -> None:
    # A bias in front of a batch norm is subtracted again: its gradient is zero by mathematics.
    case = Case("regularised", 0, "segmented", 8)
    dead = pytest.raises(AssertionError, match=r"seed\.0\.bias is dead")
    with registered("regularised", lambda width: Regularised(width, bias=True)), dead:
        is_alive(case)


# --- refusals ---------------------------------------------------------------------------------


class Narrow(nn.Conv2d):
    def __init__(self, width: int) -> None:
        super().__init__(width, width, 3)


class TwoResults(nn.Conv2d):
    def __init__(self, width: int) -> None:
        super().__init__(width, width, 1)

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return h, h


class Undefined(nn.Module):
    """0/0 from the start."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        return h * (self.scale / self.scale)


class Loud(nn.Module):
    """A delta of h at birth; the tests' probe reaches from −1 to 1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, h: Tensor) -> Tensor:
        return self.scale * h


class LoudExceptOnConstants(nn.GroupNorm):
    def __init__(self, width: int) -> None:
        super().__init__(1, width)


class TooWide(nn.Conv2d):
    def __init__(self, width: int) -> None:
        super().__init__(width + 1, width, 1)


class WithoutWeights(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()

    def forward(self, h: Tensor) -> Tensor:
        return 0.0 * h


def needs_even_groups(width: int) -> nn.Module:
    return nn.GroupNorm(3, width)


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (
            Narrow,
            r"blueprint 'odd' must keep the shape of its input \(2, 4, 6, 6\); it returned \(2, 4, 4, 4\)",
        ),
        (
            TwoResults,
            r"blueprint 'odd' must keep the shape of its input \(2, 4, 6, 6\); it returned tuple",
        ),
        (Undefined, "blueprint 'odd' returned a non-finite delta at birth"),
        (
            Loud,
            r"blueprint 'odd' must return a delta of exactly zero at birth; its largest value is 1\."
            r" Make it an esper\.kasmina\.Mirrored or start its last linear layer at zero",
        ),
        (LoudExceptOnConstants, "blueprint 'odd' must return a delta of exactly zero at birth"),
        (TooWide, r"blueprint 'odd' fails on features of shape \(4, 6, 6\): .*expected input"),
        (
            WithoutWeights,
            r"blueprint 'odd' fails on features of shape \(4, 6, 6\): optimizer got an empty parameter list",
        ),
        (
            needs_even_groups,
            r"blueprint 'odd' fails on features of shape \(4, 6, 6\): .*must be divisible",
        ),
    ],
)
def test_a_blueprint_that_does_not_fit_is_refused_and_the_slot_stays_empty(
    build: Callable[[int], nn.Module], sentence: str
) -> None:
    trial = begin("segmented", 4)
    keys, outputs = list(trial.model.state_dict()), trial.outputs()
    with registered("odd", build), pytest.raises(BlueprintError, match=sentence):
        germinate(trial.model, "odd", style=0)
    slot = trial.model.slot(SLOT)
    assert (slot.seed, slot.gate, slot.optimiser) == (None, None, None)
    assert list(trial.model.state_dict()) == keys
    assert not trial.model.table.occupied.any()
    assert all(map(torch.equal, trial.outputs(), outputs))
    assert germinate(trial.model, "conv_light", style=0).succeeded, "the next seed is welcome"


def test_an_occupied_slot_takes_no_second_seed() -> None:
    trial = planted(Case("conv_light", 0, "segmented", 4))
    first = trial.model.slot(SLOT).seed
    with pytest.raises(SlotError, match="slot r0c0 holds a seed already; prune it before the next one"):
        trial.model.germinate(SLOT, 1, 0)
    assert trial.model.slot(SLOT).seed is first


def test_a_seed_needs_to_know_the_hosts_optimiser() -> None:
    model = MorphogeneticModel(build_host("segmented", 4))
    with pytest.raises(RuntimeError, match=r"call bind_optimiser\(host_optimiser\) before the first seed"):
        model.germinate(SLOT, 1, 0)


def test_a_name_is_registered_once() -> None:
    with pytest.raises(
        BlueprintError,
        match=r"blueprint 'norm' is registered for feature_map already; choose another name"
        r" \(taken: conv_heavy, conv_light, conv_small, depthwise, norm\)",
    ):
        register_blueprint("norm", topology="feature_map")(Loud)
    assert len(specs_for("feature_map")) == 5


def test_a_users_blueprints_take_the_indices_that_their_topology_leaves_free() -> None:
    # Of 13 indices feature maps reserve NOOP and seven built-in ones, registered or not.
    with ExitStack() as own:
        for letter in "abcde":
            own.enter_context(registered(letter, Loud))
        assert names_for("feature_map")[8:] == ("a", "b", "c", "d", "e")
        assert names_for("tokens")[8:] == ("lora", "lora_large", "mlp_small", "mlp", "flex_attention")
        with pytest.raises(
            BlueprintError,
            match=r"no action index is left for blueprint 'f': feature_map hosts take at most 5 blueprints"
            r" of a user's own; unregister one first",
        ):
            own.enter_context(registered("f", Loud))
    assert len(specs_for("feature_map")) == 5


def test_a_built_in_name_keeps_its_own_index() -> None:
    with registered("attention", Loud):
        assert [spec.index for spec in specs_for("feature_map") if spec.name == "attention"] == [2]


def test_unknown_names_are_met_with_near_ones() -> None:
    with pytest.raises(
        UnknownNameError,
        match=r"unknown blueprint for feature_map hosts 'conv_lite'; did you mean conv_light or conv_small",
    ):
        unregister_blueprint("conv_lite", "feature_map")
    with pytest.raises(
        UnknownNameError, match=r"unknown topology 'feature_maps'; did you mean feature_map\?"
    ):
        register_blueprint("mine", topology="feature_maps")(Loud)  # type: ignore[arg-type]
    trial = begin("segmented", 4)
    with pytest.raises(BlueprintError, match=r"no blueprint has index 0 on feature_map hosts; there are 1"):
        trial.model.germinate(SLOT, 0, 0)
