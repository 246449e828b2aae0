import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from esper.kasmina.optim import OptimiserRecipe, cosine_rate, set_rate
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from esper.kasmina import CNNHost, MorphogeneticModel
from esper.leyline import LifecycleRules
from tests.contracts.matrix import CLASSES, INPUT_SHAPE, SLOT, Trial, germinate, restart

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
    restart(0)
    host = CNNHost((4, 4), kernel=3, input_shape=INPUT_SHAPE, classes=CLASSES)
    model = MorphogeneticModel(host, LifecycleRules(min_training_epochs=training_epochs))
    optimiser = make(host.parameters())
    model.bind_optimiser(optimiser)
    return Trial(model, optimiser)


def settings_of(optimiser: Optimizer | None) -> list[dict[str, Any]]:
    assert optimiser is not None
    return [{**group, "params": None} for group in optimiser.param_groups]


@every_optimiser
@pytest.mark.parametrize("training_epochs", [0, 5])
def test_a_seeds_optimiser_is_like_the_hosts_which_never_hears_of_seeds(
    make: Make, training_epochs: int
) -> None:
    trial = trial_with(make, training_epochs)
    trial.train(2)
    groups = copy.deepcopy(settings_of(trial.optimiser))
    members = [[id(p) for p in group["params"]] for group in trial.optimiser.param_groups]
    known = {id(p) for p in trial.optimiser.state}
    germinate(trial.model, "conv_heavy", style=3)
    slot = trial.model.slot(SLOT)
    assert type(slot.optimiser) is type(trial.optimiser)
    assert settings_of(slot.optimiser) == groups
    owned = [p for group in slot.optimiser.param_groups for p in group["params"]]
    assert [id(p) for p in owned] == [id(p) for p in slot.parameters()], "the gate is trained too"
    trial.train(2, first=2)
    assert settings_of(trial.optimiser) == groups
    assert [[id(p) for p in group["params"]] for group in trial.optimiser.param_groups] == members
    assert {id(p) for p in trial.optimiser.state} == known
    assert {id(p) for p in slot.optimiser.state} == {id(p) for p in slot.parameters()}


def test_a_seeds_clock_starts_at_the_first_learning_rate() -> None:
    trial = trial_with(OPTIMISERS["sgd"])
    set_rate(trial.optimiser, 0.001)
    germinate(trial.model, "norm", style=0)
    optimiser = trial.model.slot(SLOT).optimiser
    assert optimiser is not None
    assert optimiser.param_groups[0]["lr"] == 0.03 == trial.model.recipe.learning_rate
    assert trial.optimiser.param_groups[0]["lr"] == 0.001
    settings = OptimiserRecipe.of(AdamW(trial.model.host.parameters())).settings
    assert "decoupled_weight_decay" not in settings, "AdamW lists it and does not take it"


@pytest.mark.parametrize(
    ("progress", "rate"),
    [(-1.0, 2.0), (0.0, 2.0), (1 / 3, 1.5), (0.5, 1.0), (2 / 3, 0.5), (1.0, 0.0), (3.0, 0.0)],
)
def test_the_cosine_falls_from_its_base_to_zero_in_every_group(progress: float, rate: float) -> None:
    assert math.isclose(cosine_rate(2.0, progress), rate, abs_tol=1e-12)
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (1.0, 2.0)]
    optimiser = SGD(groups, lr=0.5)
    set_rate(optimiser, rate)
    assert [group["lr"] for group in optimiser.param_groups] == [rate, rate]
