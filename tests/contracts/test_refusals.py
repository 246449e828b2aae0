"""Refused blueprints, slots and names: each raises a one-sentence error and leaves the network unchanged."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina import Host, MorphogeneticModel, register_blueprint
from esper.kasmina.birth import fits
from esper.kasmina.blueprints import blueprint_named, blueprint_names, specs_for, unregister_blueprint
from esper.leyline import BlueprintAction
from esper.leyline.errors import BlueprintError, SlotError, UnknownNameError
from tests.contracts.hosts import CLASSES, VOCABULARY
from tests.contracts.matrix import (
    SLOT,
    Case,
    Trial,
    assert_same,
    begin,
    build_host,
    germinate,
    planted,
    registered,
)

Build = Callable[[int], nn.Module]


class Odd(nn.Module):
    """Seed with one layer and a given ``forward`` function that violates a rule for seeds."""

    def __init__(self, layer: nn.Module, forward: Callable[[nn.Module, Tensor], object]) -> None:
        super().__init__()
        self.layer, self._forward = layer, forward

    def forward(self, h: Tensor) -> object:
        return self._forward(self.layer, h)


def odd(forward: Callable[[nn.Module, Tensor], object]) -> Build:
    """Return a blueprint of a 1×1 convolution whose ``forward`` violates a rule for seeds."""
    return lambda width: Odd(nn.Conv2d(width, width, 1), forward)


non_zero = odd(lambda layer, h: h + 0 * layer(h))
"""Blueprint of a seed that returns its input as delta, which is not zero at birth."""
undefined = odd(lambda layer, h: 0 * layer(h) / 0)
two_results = odd(lambda layer, h: (h, h))
non_zero_in_evaluation = odd(lambda layer, h: layer(h) * (0.0 if layer.training else 1.0))
overwriting = odd(lambda layer, h: 0 * layer(h.relu_()))
"""Blueprint of a seed with delta zero that changes the host's features by an in-place ReLU."""


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda width: nn.Conv2d(width, width, 3), r"keep the shape .*; it returned \(2, 4, 2, 2\)"),
        (two_results, r"blueprint 'odd' must keep the shape of its input \(2, 4, 4, 4\); it returned tuple"),
        (undefined, "blueprint 'odd' returned a non-finite delta at birth; look for a division by zero"),
        (overwriting, "blueprint 'odd' changes its input in place, .* features; leave out inplace=True"),
        (non_zero_in_evaluation, "blueprint 'odd' must return a delta of exactly zero at birth"),
        (
            non_zero,
            r"zero at birth; its largest value is 1\. Make it an esper\.kasmina\.Mirrored or start its",
        ),
        (lambda width: nn.GroupNorm(1, width), "must return a delta of exactly zero at birth"),
        (lambda width: nn.Conv2d(width + 1, width, 1), r"of shape \(4, 4, 4\): .*expected input"),
        (lambda width: nn.Threshold(9.0, 0.0), "'odd' has no parameters, so its seed could not learn"),
        (lambda width: nn.GroupNorm(3, width), r"'odd' fails on features of shape \(4, 4, 4\): .*divisible"),
    ],
)
def test_refused_blueprint_leaves_the_network_unchanged_and_does_not_prevent_planting_another_seed(
    build: Build, sentence: str
) -> None:
    trial = begin("images", 4)
    before = everything(trial)
    with registered("odd", build), pytest.raises(BlueprintError, match=sentence):
        germinate(trial.model, "odd", style=0)
    assert_as_before(trial, before)
    assert germinate(trial.model, "conv_light", style=0).succeeded


def everything(trial: Trial) -> dict[str, Tensor]:
    """Return weights, optimiser state, slot table, random states and outputs, to compare them later."""
    # Slot tables are compared as bytes, because unknown measurements are NaN and NaN does not equal NaN.
    arrays = {name: bytearray(array.tobytes()) for name, array in trial.model.table.arrays().items()}
    table = {f"table.{name}": torch.frombuffer(a, dtype=torch.uint8) for name, a in arrays.items()}
    outputs = dict(zip(("evaluated", "trained"), trial.outputs(), strict=True))
    return trial.snapshot() | trial.seed_snapshot() | table | outputs


def assert_as_before(trial: Trial, before: dict[str, Tensor]) -> None:
    slot = trial.model.slot(SLOT)
    assert (slot.graft, slot.handle, trial.model.seed_parameters(SLOT)) == (None, None, [])
    assert len(trial.optimiser.param_groups) == 1
    assert_same(everything(trial), before)


# --- a width that does not fit ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["attention", "flex_attention"])
@pytest.mark.parametrize("width", [1, 6, 9])
def test_attention_seed_is_refused_if_its_number_of_heads_does_not_divide_the_slot_width(
    name: str, width: int
) -> None:
    trial = begin("tokens", width)
    before = everything(trial)
    sentence = (
        rf"blueprint '{name}' needs a slot whose width is a multiple of 4; slot r0c0 is {width} wide\. Change"
        r" the host's width, or choose from stack, norm, lora, lora_large, mlp_small, mlp$"
    )
    with pytest.raises(BlueprintError, match=sentence):
        trial.model.germinate(SLOT, BlueprintAction[name.upper()], 0)
    assert_as_before(trial, before)


class Widening(Host):
    """Token host with one slot of width six and one of width eight."""

    topology = "tokens"
    feature_shapes = ((5, 6), (5, 8))

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Embedding(VOCABULARY, 6), nn.Linear(6, 8), nn.Linear(8, CLASSES))
        self.segments = nn.ModuleList(layers)


def test_blueprint_that_fits_only_some_slots_is_selectable_but_refused_in_the_other_slots() -> None:
    nowhere = begin("tokens", 6)
    space = nowhere.model.action_space
    names = [space.blueprint_names[index] for index in space.blueprints]
    assert names == ["stack", "norm", "lora", "lora_large", "mlp_small", "mlp"]
    assert space.unfit == frozenset()
    model = MorphogeneticModel(Widening())
    elsewhere = Trial(model, torch.optim.SGD(model.host.parameters(), lr=0.1))
    model.bind_optimiser(elsewhere.optimiser)
    assert model.action_space.unfit == {(0, BlueprintAction.ATTENTION), (0, BlueprintAction.FLEX_ATTENTION)}
    for trial, check in ((nowhere, "blueprint_selectable"), (elsewhere, "blueprint_fits")):
        before = everything(trial)
        outcome = germinate(trial.model, "attention", 0)
        assert (outcome.succeeded, outcome.refused_by, outcome.failed_checks) == (False, "G0", (check,))
        assert_as_before(trial, before)
    assert germinate(model, "attention", 0, slot=1).succeeded


def test_blueprint_with_multiple_of_2_fits_only_slots_of_even_width() -> None:
    with registered("pairs", non_zero, multiple_of=2):
        spec = blueprint_named("pairs", "feature_map")
        sites = begin("images", 9).model.sites
        assert [n for n in range(1, 7) if fits(spec, replace(sites[0], width=n))] == [2, 4, 6]
        assert spec.index not in begin("images", 9).model.action_space.blueprints
    specs = specs_for("feature_map")
    assert all(7 % spec.multiple_of == 0 for spec in specs), "built-in blueprints fit every feature map"
    with pytest.raises(
        BlueprintError, match=r"multiple_of must be 1 or more; blueprint 'none' has 0\. Leave it out"
    ):
        register_blueprint("none", topology="feature_map", multiple_of=0)(non_zero)


# --- slots and names ----------------------------------------------------------------------------


def test_germination_in_an_occupied_slot_or_in_a_network_without_an_optimiser_is_refused() -> None:
    trial = planted(Case("conv_light", 0, "images", 4))
    first = trial.model.slot(SLOT).seed
    with pytest.raises(SlotError, match="slot r0c0 holds a seed already; prune it before the next one"):
        trial.model.germinate(SLOT, 1, 0)
    assert trial.model.slot(SLOT).seed is first
    model = MorphogeneticModel(build_host("images", 4))
    with pytest.raises(RuntimeError, match=r"call bind_optimiser\(host_optimiser\) before the first seed"):
        model.germinate(SLOT, 1, 0)


def test_blueprint_name_is_refused_if_it_is_already_registered_for_its_topology() -> None:
    with pytest.raises(
        BlueprintError,
        match=r"blueprint 'norm' is registered for feature_map already; choose another name"
        r" \(taken: attention, bottleneck, conv_heavy, conv_light, conv_small, depthwise, norm, stack,"
        r" widen\)",
    ):
        register_blueprint("norm", topology="feature_map")(non_zero)
    with registered("mine", non_zero):
        with pytest.raises(BlueprintError, match="blueprint 'mine' is registered for feature_map already"):
            register_blueprint("mine", topology="feature_map")(two_results)
        assert blueprint_named("mine", "feature_map").build is non_zero, "the first one is kept"
        with registered("mine", non_zero, "tokens"):
            assert "mine" in blueprint_names(["tokens"]), "each topology has its own names"
    assert [len(specs_for(topology)) for topology in ("feature_map", "tokens")] == [9, 9]


def test_user_blueprints_get_free_action_indices_and_are_refused_when_none_is_left() -> None:
    # Of the 13 blueprint indices for feature maps, ten are in use: by NOOP, seven built-in blueprints,
    # ``stack`` and ``widen``.
    with ExitStack() as own:
        for letter in "abc":
            own.enter_context(registered(letter, non_zero))
        assert blueprint_names(["feature_map"])[8:] == ("stack", "widen", "a", "b", "c")
        assert blueprint_names(["tokens"])[8:] == ("lora", "lora_large", "mlp_small", "mlp", "flex_attention")
        with pytest.raises(
            BlueprintError,
            match=r"no action index is left for blueprint 'f': feature_map hosts have .*widen, a, b, c; ",
        ):
            own.enter_context(registered("f", non_zero))
    assert len(specs_for("feature_map")) == 9


def test_built_in_blueprint_that_is_unregistered_and_registered_again_keeps_its_action_index() -> None:
    built_in = blueprint_named("bottleneck", "feature_map")
    unregister_blueprint("bottleneck", "feature_map")
    try:
        with registered("mine", non_zero), registered("bottleneck", non_zero):
            assert [blueprint_named(name, "feature_map").index for name in ("mine", "bottleneck")] == [10, 5]
    finally:
        register_blueprint("bottleneck", topology="feature_map")(built_in.build)


def test_error_for_an_unknown_blueprint_or_topology_suggests_similar_names() -> None:
    with pytest.raises(
        UnknownNameError,
        match=r"unknown blueprint for feature_map hosts 'conv_lite'; did you mean conv_light or conv_small",
    ):
        unregister_blueprint("conv_lite", "feature_map")
    with pytest.raises(
        UnknownNameError, match=r"unknown topology 'feature_maps'; did you mean feature_map or features\?"
    ):
        register_blueprint("mine", topology="feature_maps")(non_zero)  # type: ignore[arg-type]
    trial = begin("images", 4)
    with pytest.raises(UnknownNameError, match="unknown blueprint for feature_map hosts 'noop'"):
        trial.model.germinate(SLOT, 0, 0)
