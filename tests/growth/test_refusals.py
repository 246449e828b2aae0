"""``Growth`` refuses invalid arguments with a one-sentence error, before the first step or at planting."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from esper.growth import Growth
from esper.leyline.errors import EsperError
from tests.growth.models import GPT, ResNet, mlp

X = torch.zeros(4, 5)


def grow(net: nn.Module, sample: Any = X, slots: Any = "auto", optimizer: Any = None, **known: Any) -> Growth:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1) if optimizer is None else optimizer
    return Growth(net, optimizer, **({"sample": sample, "slots": slots, "mode": "min"} | known))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.unused, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.ids, self.act = nn.Identity(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        self.ids((x > 0).long())
        return self.act(self.head(self.act(self.lin(self.lin(x)))))


class AllChildren(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            x = child(x)
        return x


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = AllChildren(), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def frozen() -> nn.Module:
    return mlp().requires_grad_(False)


def other_optimiser() -> torch.optim.Optimizer:
    return torch.optim.SGD(mlp().parameters(), lr=0.1)


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """Stand-in for torch's ZeroRedundancyOptimizer, which needs several processes."""


REFUSALS = {
    "calibration by a number": (lambda: grow(mlp(), calibrate=5), "calibrate is a int; pass a DataLoader or"),
    "calibration once": (lambda: grow(mlp(), calibrate=iter([X])), "calibrate is a list_iterator; pass"),
    "no direction of the metric": (
        lambda: Growth(mlp(), sample=X),
        "mode is missing; pass 'min' if the metric is a loss, 'max' if larger values are better",
    ),
    "wrong direction of the metric": (
        lambda: grow(mlp(), mode="up"),
        "mode is 'up'; pass 'min' if the metric is a loss, 'max' if larger values are better",
    ),
    "a limit below 0": (
        lambda: grow(mlp(), max_seeds=-3),
        "max_seeds is -3; it must be a whole number, 0 or",
    ),
    "no slot matches": (
        lambda: grow(mlp(), slots="layer?"),
        "unknown submodule of Sequential for a slot 'layer?'. Allowed: 0, 1, 2, 3, 4. Patterns",
    ),
    "no slot named": (
        lambda: grow(mlp(), slots=[]),
        "no slot was named; the submodules of Sequential are 0, 1,",
    ),
    "one place twice": (
        lambda: grow(nn.Sequential(nn.Sequential(nn.Linear(5, 5)), nn.Linear(5, 3)), slots=["0", "0.0"]),
        "slots 0 and 0.0 are one place, the output of '0.0'; name it once",
    ),
    "called with several widths": (
        lambda: grow(Shared(), slots="act"),
        "submodule 'act' (ReLU) returns features of several widths, 5 and 3; name a submodule with one",
    ),
    "never run": (
        lambda: grow(Shared(), slots="unused"),
        "submodule 'unused' (Linear) runs 0 times in one forward; name one that runs",
    ),
    "no features": (
        lambda: grow(Shared(), slots="ids"),
        "submodule 'ids' (Identity) returns torch.int64 of shape (4, 5); a slot needs floats",
    ),
    "iterates over its children": (
        lambda: grow(Outer(), slots="inner"),
        "the submodule at 'inner' runs all its children in turn, its slot among them; name the",
    ),
    "container with a forward of its own": (
        lambda: grow(nn.Sequential(Residual(nn.Linear(5, 5)), nn.Linear(5, 3)), slots="0"),
        "submodule '0' (Residual) is a container that hands on something else than its last child's output",
    ),
    "wrong sample": (
        lambda: grow(mlp(), torch.zeros(4, 7)),
        "Sequential fails on the sample: RuntimeError: mat1 and mat2 shapes cannot be multiplied",
    ),
    "sample of one": (
        lambda: grow(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), X[:1]),
        "Sequential fails on the sample in training mode: Expected more than 1 value per channel",
    ),
    "sample with targets": (
        lambda: grow(mlp(), (X, torch.zeros(4))),
        "the sample has 2 parts, and Sequential.forward(input) does not take them (too many",
    ),
    "another network's optimiser": (
        lambda: grow(mlp(), optimizer=other_optimiser()),
        "the optimiser holds none of the 6 parameters of this Sequential; pass the one that trains it",
    ),
    "everything frozen": (
        lambda: grow(frozen()),
        "no parameter of Sequential requires a gradient, so nothing would train; leave at least its last"
        " layer trainable, or, to train seeds alone, pass an optimiser with an empty group",
    ),
    "LBFGS": (
        lambda: grow(net := mlp(), optimizer=torch.optim.LBFGS(net.parameters())),
        "LBFGS keeps all parameters as one flat vector and cannot take in a seed; use AdamW or SGD",
    ),
    "sharded optimiser": (
        lambda: grow(net := mlp(), optimizer=ZeroRedundancyOptimizer(net.parameters(), lr=0.1)),
        "ZeroRedundancyOptimizer shards its state over processes and cannot take in a seed",
    ),
    "no optimiser": (
        lambda: grow(mlp(), optimizer="adam"),
        "optimizer is str; pass a torch.optim.Optimizer, a",
    ),
    "no network": (
        lambda: Growth([], None, sample=X, mode="max"),
        "net is list; pass the torch.nn.Module that is trained",
    ),
    "data parallel": (
        lambda: grow(nn.DataParallel(mlp())),
        "DataParallel keeps parameters where a seed cannot join them; use one",
    ),
    "an average": (
        lambda: grow(AveragedModel(mlp())),
        "AveragedModel is an average of a network; pass the network",
    ),
    "controller": (lambda: grow(mlp(), controller=3), "controller is int; pass 'auto', heuristic, counting,"),
    "no blueprints": (
        lambda: grow(mlp(), blueprints=[]),
        "blueprints is []; name at least one, such as ['mlp_small'], or leave it out",
    ),
    "blueprints as a number": (lambda: grow(mlp(), blueprints=3), "blueprints is 3; name at least one, such"),
    "unknown blueprint": (
        lambda: grow(mlp(), blueprints=["mlp_smal"]),
        "unknown blueprint 'mlp_smal'; did you mean mlp_small",
    ),
    "plan with another blueprint": (
        lambda: grow(mlp(), blueprints="norm", controller="lora@2:1"),
        "unknown blueprint 'lora'; did you mean norm? Allowed: norm.",
    ),
    "plan before the first epoch": (
        lambda: grow(mlp(), controller="mlp@2:0"),
        "plan 'mlp@2:0' plants at step 0, and the first decision comes at the end of epoch 1; write 1, or",
    ),
    "plan behind the last epoch": (
        lambda: grow(mlp(), controller="mlp@2:30", epochs=30),
        "plan 'mlp@2:30' plants after epoch 30 of 30, when no training is left for the seed; plan an",
    ),
    "plan": (lambda: grow(mlp(), controller="mlp@9:1"), "slot '9' is not in this model; its slots are 0, 2"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_growth_refuses_invalid_arguments_with_a_one_sentence_error(name: str) -> None:
    use, sentence = REFUSALS[name]
    with pytest.raises(EsperError, match=f"^{re.escape(sentence)}"):
        use()


def test_network_has_no_slots_after_a_refused_growth_and_can_be_grown_afterwards() -> None:
    net = Outer()
    with pytest.raises(EsperError):
        grow(net, slots="inner")
    assert [name for name, _ in net.named_modules()] == ["", "inner", "inner.a", "inner.b", "head"]
    with pytest.raises(EsperError, match="unknown blueprint 'mpl'"):
        grow(net, slots="inner.b", controller="mpl@inner.b:1")
    grow(net, slots="inner.b")


class TupleInTraining(nn.Module):
    """Layer that returns its output and its input as a tuple in training mode, like layers with an auxiliary
    loss."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Any:
        return (self.lin(x), x) if self.training else self.lin(x)


class SkippedInTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else self.lin(x)


class ModeNet(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        return self.head(hidden[0] if isinstance(hidden, tuple) else hidden)


UNCHANGED = {
    "slot named twice": (mlp, {"slots": ["0", "2", "0"]}, "slot '0' is named twice; name it once"),
    "optimiser of another network": (
        mlp,
        {"optimizer": other_optimiser()},
        "the optimiser holds none of the 6 parameters of this Sequential; pass the one that trains it",
    ),
    "tuple in training mode only": (
        lambda: ModeNet(TupleInTraining()),
        {"slots": "layer"},
        "submodule 'layer' returns tuple in training mode, and returns a tensor in evaluation mode; name"
        " a submodule that is the same in both as the slot",
    ),
    "skipped in training mode": (
        lambda: ModeNet(SkippedInTraining()),
        {"slots": "layer.lin"},
        "submodule 'layer.lin' runs 0 times in training mode, and returns a tensor in evaluation mode;",
    ),
    "unknown controller": (mlp, {"controller": "atuo"}, "controller is 'atuo'; pass 'auto', heuristic,"),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_refused_growth_leaves_network_optimiser_and_random_state_unchanged(name: str) -> None:
    build, settings, sentence = UNCHANGED[name]
    net = build()
    optimizer = settings.get("optimizer") or torch.optim.Adam(net.parameters())
    net(X)[..., 0].sum().backward()
    optimizer.step()
    net.eval()
    state = {key: value.clone() for key, value in net.state_dict().items()}
    groups = [list(map(id, group["params"])) for group in optimizer.param_groups]
    kept, random_state = len(optimizer.state), torch.get_rng_state()
    with pytest.raises(EsperError, match=f"^{re.escape(sentence)}"):
        grow(net, **({"optimizer": optimizer} | settings))

    assert list(net.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())
    assert not any(module.training or module._forward_hooks for module in net.modules())
    assert [list(map(id, group["params"])) for group in optimizer.param_groups] == groups
    assert len(optimizer.state) == kept
    assert torch.equal(torch.get_rng_state(), random_state)


def test_second_growth_on_one_network_is_refused() -> None:
    net = mlp()
    grow(net)
    with pytest.raises(EsperError, match="this Sequential is growing already; call finish"):
        grow(net)


@pytest.mark.parametrize("made", ["before", "after"])
def test_update_of_an_averaged_model_without_the_seeds_of_the_network_is_refused(made: str) -> None:
    net = mlp()
    average = AveragedModel(net) if made == "before" else None
    growth = grow(net)
    average = average or AveragedModel(net)
    average.update_parameters(net)
    growth.germinate("0", "mlp")
    with pytest.raises(EsperError, match=r"does not follow its growth \(seed in 0\) .* follow=\[averaged\]"):
        average.update_parameters(net)


def test_averaged_model_made_before_growth_receives_seeds_if_given_as_argument_follow() -> None:
    net = mlp()
    average = AveragedModel(net)
    growth = grow(net, follow=[average])
    growth.germinate("0", "mlp")
    average.update_parameters(net)
    assert len(list(average.module.parameters())) == len(list(net.parameters()))


def test_argument_follow_refuses_an_averaged_model_of_another_network() -> None:
    net = mlp()
    before = [name for name, _ in net.named_modules()]
    with pytest.raises(EsperError, match="follow holds a AveragedModel that is no copy of this Sequential"):
        grow(net, follow=[AveragedModel(nn.Sequential(nn.Linear(2, 2)))])
    assert [name for name, _ in net.named_modules()] == before


HAND = {
    "unknown slot": (
        lambda g: g.germinate("layer9", "mlp"),
        "slot 'layer9' is not in this model; its slots are 0, 2",
    ),
    "unknown blueprint": (
        lambda g: g.germinate("0", "conv_light"),
        "unknown blueprint for features hosts 'conv_light'. Allowed: stack, widen, norm, lora, lora_large",
    ),
    "unknown style": (
        lambda g: g.germinate("0", "mlp", style="gated"),
        "unknown style 'gated'; did you mean",
    ),
    "no block to copy": (
        lambda g: g.germinate("0", "stack"),
        "blueprint 'stack' copies the last block upstream, and slot 0 has none that can be copied: '0' is a"
        " single layer and not a block of layers",
    ),
    "full slot": (
        lambda g: g.germinate("2", "mlp"),
        "slot 2 holds a seed already; prune it before the next one",
    ),
    "empty slot": (lambda g: g.prune("0"), "slot 0 holds no seed that could be changed: it is DORMANT"),
    "alpha": (lambda g: g.set_alpha("2", 1.5), "alpha is 1.5; it must be from 0 to 1"),
    "alpha in words": (lambda g: g.set_alpha("2", "half"), "alpha is 'half'; it must be from 0 to 1"),
    "another state": (
        lambda g: g.load_state_dict({}),
        "this is no state of a Growth; pass what its state_dict",
    ),
    "half blended": (
        lambda g: (g.set_alpha("2", 0.5), g.fossilize("2")),
        "lora in 2 is blended at alpha 0.5; set_alpha('2', 1.0) first",
    ),
    "too large": (
        lambda g: g.germinate("0", "mlp"),
        "the seed has 560 parameters, and of max_params=200 only 72 are left; choose a smaller blueprint",
    ),
    "no metric": (
        lambda g: g.end_epoch(lambda: None),
        "evaluate returned NoneType (None); it must return a number",
    ),
    "a word": (
        lambda g: g.end_epoch(lambda: "good"),
        "evaluate returned str (good); it must return a number",
    ),
    "a number": (lambda g: g.end_epoch(0.5), "evaluate is float; pass a function that returns the metric"),
    "no batches": (lambda g: g.end_epoch(list), "evaluate returned '[]'; it must return a number"),
}


@pytest.mark.parametrize("name", HAND)
def test_invalid_action_by_the_user_is_refused_with_a_one_sentence_error_and_changes_nothing(
    name: str,
) -> None:
    use, sentence = HAND[name]
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    growth = grow(net, slots=["0", "2"], optimizer=optimizer, max_params=200, controller=None)
    # A lora seed of width 8 has 2 · (8 · 4 + 4 · 8) = 128 parameters.
    growth.germinate("2", "lora")
    before = torch.get_rng_state()
    keys, held = list(net.state_dict()), len(optimizer.param_groups[0]["params"])
    with pytest.raises(EsperError, match=f"^{re.escape(sentence)}"):
        use(growth)
    assert (list(net.state_dict()), len(optimizer.param_groups[0]["params"])) == (keys, held)
    assert torch.equal(torch.get_rng_state(), before)


def test_growth_refuses_to_load_the_state_of_another_network_class_or_of_other_slots() -> None:
    state = grow(ResNet(), torch.zeros(2, 1, 8, 8), "layer2").state_dict()
    sentence = (
        r"the checkpoint is of a tests\.growth\.models\.ResNet with slots layer2 \(feature_map, 8 wide\)"
    )
    with pytest.raises(EsperError, match=sentence):
        grow(GPT(), torch.zeros(2, 6, dtype=torch.long), "h.0").load_state_dict(state)
    with pytest.raises(EsperError, match=sentence):
        grow(ResNet(), torch.zeros(2, 1, 8, 8), "layer1").load_state_dict(state)


def test_seed_with_vector_parameters_is_refused_if_the_only_optimiser_is_muon() -> None:
    net = nn.Sequential(nn.Linear(5, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False))
    growth = grow(net, slots="0", optimizer=torch.optim.Muon(net.parameters()), controller=None)
    with pytest.raises(
        EsperError, match=r"Muon steps on matrices only, and the seed has a parameter of shape \(16,\)"
    ):
        growth.germinate("0", "mlp")
    assert len(list(net.parameters())) == 2
    growth.germinate("0", "lora")
