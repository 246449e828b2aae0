"""Parameter groups of seeds in the optimiser of the host."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from esper.kasmina import CNNHost, MorphogeneticModel
from esper.kasmina.optimizer_state import clone_tree
from esper.leyline import LifecycleRules
from tests.contracts.matrix import CLASSES, INPUT_SHAPE, SLOT, Trial, assert_same, germinate, restart
from tests.tolaria.building import bits

Make = Callable[[Any], Optimizer]

OPTIMISERS: dict[str, Make] = {
    "sgd": lambda p: SGD(p, lr=0.03, momentum=0.8, weight_decay=1e-3, nesterov=True),
    "sgd_foreach": lambda p: SGD(p, lr=0.03, momentum=0.8, foreach=True),
    "adam": lambda p: Adam(p, lr=0.02, betas=(0.8, 0.9), eps=1e-6, amsgrad=True),
    "adamw": lambda p: AdamW(p, lr=0.01, weight_decay=0.2),
    "rmsprop": lambda p: RMSprop(p, lr=0.005, alpha=0.9, momentum=0.5, centered=True),
}
every_optimiser = pytest.mark.parametrize("make", OPTIMISERS.values(), ids=OPTIMISERS)


def trial_with(make: Make, training_epochs: int = 0) -> Trial:
    """Return an untrained CNN without seeds, with the optimiser that ``make`` constructs."""
    restart(0)
    host = CNNHost((4, 4), kernel=3, input_shape=INPUT_SHAPE, classes=CLASSES)
    model = MorphogeneticModel(host, LifecycleRules(min_training_epochs=training_epochs))
    optimiser = make(host.parameters())
    model.bind_optimiser(optimiser)
    return Trial(model, optimiser)


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group, without its parameters."""
    return {**group, "params": None}


@every_optimiser
@pytest.mark.parametrize("training_epochs", [0, 5])
def test_seed_has_a_separate_parameter_group_with_the_settings_of_the_hosts_group(
    make: Make, training_epochs: int
) -> None:
    trial = trial_with(make, training_epochs)
    trial.train(2)
    [host] = trial.optimiser.param_groups
    settings, members = copy.deepcopy(settings_of(host)), [id(p) for p in host["params"]]
    germinate(trial.model, "conv_heavy", style=3)
    slot, groups = trial.model.slot(SLOT), trial.model.groups
    assert groups is not None
    own = groups.own_group(SLOT)
    assert all(a is b for a, b in zip(trial.optimiser.param_groups, (host, own), strict=True))
    assert settings_of(own) == settings
    assert [id(p) for p in own["params"]] == [id(p) for p in slot.parameters()], "the gate is included"
    trial.train(2, first=2)
    assert settings_of(host) == settings
    assert [id(p) for p in host["params"]] == members
    assert {id(p) for p in trial.optimiser.state} == {*members, *(id(p) for p in slot.parameters())}


@every_optimiser
def test_incubating_seed_leaves_weights_and_optimiser_state_of_the_host_bit_equal(make: Make) -> None:
    trial, twin = trial_with(make, 9), trial_with(make, 9)
    trial.train(2)
    germinate(trial.model, "conv_heavy", style=3)
    trial.train(3, first=2)
    found = trial.snapshot()
    twin.train(5)
    assert_same(found, twin.snapshot())


def test_new_seed_starts_with_the_optimisers_initial_learning_rate_and_not_the_hosts_current_rate() -> None:
    trial = trial_with(OPTIMISERS["sgd"])
    groups = trial.model.groups
    assert groups is not None
    trial.optimiser.param_groups[0]["lr"] = 0.001
    germinate(trial.model, "norm", style=0)
    assert groups.own_group(SLOT)["lr"] == 0.03
    groups.own_group(SLOT)["lr"] = 0.5
    assert trial.optimiser.param_groups[0]["lr"] == 0.001


@every_optimiser
def test_optimiser_has_no_parameter_group_and_no_moments_of_a_removed_seed(make: Make) -> None:
    trial = trial_with(make)
    germinate(trial.model, "norm", style=0, slot=1)
    germinate(trial.model, "conv_light", style=0, slot=0)
    trial.train(2)
    [host, kept, _] = trial.optimiser.param_groups
    trial.model.remove(0)
    found = trial.optimiser.param_groups
    assert len(found) == 2
    assert found[0] is host
    assert found[1] is kept
    held = {id(p) for group in found for p in group["params"]}
    assert {id(p) for p in trial.optimiser.state} == held
    assert held == {id(p) for p in trial.model.parameters()}


@every_optimiser
def test_loaded_state_restores_parameter_groups_and_moments_of_seeds_planted_out_of_slot_order(
    make: Make,
) -> None:
    trial = trial_with(make)
    for slot, blueprint in ((1, "conv_small"), (0, "norm")):
        germinate(trial.model, blueprint, style=0, slot=slot)
    trial.train(2)
    assert trial.model.groups is not None
    trial.model.groups.own_group(1)["lr"] = 0.125
    state = trial.state()
    assert state["groups"]["order"] == [1, 0]
    other = trial_with(make)
    germinate(other.model, "depthwise", style=0, slot=0)
    other.train(1)
    other.load_state(state)
    assert other.model.groups is not None
    for slot in (0, 1):
        own = other.model.groups.own_group(slot)
        assert any(own is group for group in other.optimiser.param_groups)
        assert [id(p) for p in own["params"]] == [id(p) for p in other.model.seed_parameters(slot)]
        assert settings_of(own) == settings_of(trial.model.groups.own_group(slot))
    assert other.model.groups.own_group(1)["lr"] == 0.125
    assert bits(other.optimiser.state_dict()) == bits(trial.optimiser.state_dict())
    trial.train(1, first=2)
    found = trial.snapshot() | trial.seed_snapshot()
    other.train(1, first=2)
    assert_same(other.snapshot() | other.seed_snapshot(), found)


def test_saved_state_of_parameter_groups_shares_no_tensor_with_the_optimiser() -> None:
    trial = trial_with(OPTIMISERS["adamw"])
    germinate(trial.model, "norm", style=0)
    trial.train(1)
    state = trial.state()
    before = bits(state["groups"])
    trial.train(1, first=1)
    assert bits(state["groups"]) == before
    trial.load_state(state)
    trial.train(1, first=1)
    assert bits(state["groups"]) == before


def test_clone_tree_copies_every_tensor_of_nested_dicts_and_lists() -> None:
    tree = {"step": torch.ones(1), "parts": [torch.zeros(2), {"lr": 0.1}]}
    twin = clone_tree(tree)
    twin["step"].zero_()
    twin["parts"][0].fill_(5.0)
    assert tree["step"].item() == 1.0
    assert tree["parts"][0].tolist() == [0.0, 0.0]  # type: ignore[index, union-attr]
    assert twin["parts"][1] == {"lr": 0.1}
