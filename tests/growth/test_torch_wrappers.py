"""Growth with wrapped optimisers, averaged models, copies, checkpoints, processes and torch.compile."""

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from esper.growth import Growth, GrowthWarning
from tests.growth.models import ResNet, mlp

X = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _same_weights() -> None:
    torch.manual_seed(0)


def step(net: nn.Module, optimizers: Any, x: torch.Tensor = X) -> None:
    several = optimizers if isinstance(optimizers, list) else [optimizers]
    net(x).square().mean().backward()
    for optimizer in several:
        optimizer.step()
        optimizer.zero_grad()


# --- optimisers -----------------------------------------------------------------------------------------


class Facade:
    """Wrapper around an optimiser, like ``AcceleratedOptimizer`` of the package accelerate."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


def test_optimiser_inside_two_wrappers_trains_a_planted_seed() -> None:
    net = mlp()
    optimizer = Facade(Facade(torch.optim.Adam(net.parameters())))
    Growth(net, optimizer, sample=X, slots="2", controller=None, mode="max").germinate("2", "mlp")
    born = [p.detach().clone() for p in net[2].esper_slot.parameters()]
    step(net, optimizer)
    assert not any(map(torch.equal, net[2].esper_slot.parameters(), born))


def test_vector_parameters_of_a_seed_are_added_to_the_second_optimiser_if_the_first_is_muon() -> None:
    net = mlp()
    muon = torch.optim.Muon([p for p in net.parameters() if p.ndim == 2])
    adam = torch.optim.AdamW([p for p in net.parameters() if p.ndim != 2])
    Growth(net, [muon, adam], sample=X, slots="2", controller=None, mode="max").germinate("2", "mlp")
    born = [p.detach().clone() for p in net[2].esper_slot.parameters()]
    step(net, [muon, adam])
    assert not any(map(torch.equal, net[2].esper_slot.parameters(), born))
    # The network has three weight matrices and three biases; the seed has four of each.
    assert [len(o.param_groups[0]["params"]) for o in (muon, adam)] == [3 + 4, 3 + 4]


def test_seed_after_a_module_without_parameters_joins_the_parameter_group_of_the_layer_upstream() -> None:
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.0), nn.Linear(8, 3))
    groups = [{"params": net[0].parameters(), "lr": 0.1}, {"params": net[3].parameters(), "lr": 0.2}]
    optimizer = torch.optim.SGD(groups)
    Growth(net, optimizer, sample=X, slots="2", controller=None, mode="max").germinate("2", "lora")
    assert [len(group["params"]) for group in optimizer.param_groups] == [2 + 4, 2]


def test_seed_in_a_frozen_backbone_is_trained_by_the_optimiser_of_the_head() -> None:
    net = mlp()
    net[:4].requires_grad_(False)
    optimizer = torch.optim.Adam(net[4].parameters())
    growth = Growth(net, optimizer, sample=X, slots="1", controller=None, mode="max")
    growth.germinate("1", "mlp")
    step(net, optimizer)
    step(net, optimizer)
    # If the weights of the seed had not changed, end_epoch would warn and the test would fail.
    assert growth.end_epoch(lambda: net(X).detach().mean()) != []


def test_prune_removes_all_parameters_state_keys_and_hooks_of_a_seed() -> None:
    net = mlp()
    optimizer = torch.optim.Adam(net.parameters())
    growth = Growth(net, optimizer, sample=X, slots="2", controller=None, mode="max")
    listed = optimizer.param_groups[0]["params"]
    keys = list(net.state_dict())
    growth.germinate("2", "mlp")
    step(net, optimizer)
    assert (len(listed), len(optimizer.state)) == (14, 14)
    assert str(growth.prune("2")) == "epoch 0: mlp in 2 was removed"
    assert optimizer.param_groups[0]["params"] is listed
    assert (len(listed), len(optimizer.state), list(net.state_dict())) == (6, 6, keys)
    assert not net[2]._forward_hooks
    growth.germinate("2", "lora")  # After a prune by the user there is no embargo.


def test_stack_seed_starts_with_weights_and_optimiser_moments_of_the_copied_block() -> None:
    net, x = ResNet(), torch.randn(4, 1, 8, 8)
    optimizer = torch.optim.Adam(net.parameters())
    growth = Growth(net, optimizer, sample=x, slots="layer2", controller=None, mode="max")
    step(net, optimizer, x)
    growth.germinate("layer2", "stack")
    assert len(net.layer2) == 3
    for ours, theirs in zip(net.layer2[2].parameters(), net.layer2[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(optimizer.state[ours]["exp_avg"], optimizer.state[theirs]["exp_avg"])


# --- averages and copies --------------------------------------------------------------------------------


def test_seeds_are_also_planted_and_pruned_in_an_averaged_model_passed_to_follow() -> None:
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    growth = Growth(net, optimizer, sample=X, slots=["1", "2"], controller=None, mode="max")
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    growth.follow(average)
    average.update_parameters(net)
    growth.germinate("2", "mlp")
    growth.germinate("1", "lora")
    names = [name for name, _ in net.named_parameters()]
    wanted = {name: p.detach().clone() for name, p in net.named_parameters()}
    for _ in range(3):
        step(net, optimizer)
        average.update_parameters(net)
        wanted = {name: 0.5 * wanted[name] + 0.5 * p.detach() for name, p in net.named_parameters()}
    assert [name for name, _ in average.module.named_parameters()] == names
    torch.testing.assert_close({n: p.detach() for n, p in average.module.named_parameters()}, wanted)
    growth.prune("1")
    growth.set_alpha("2", 0.5)
    average.update_parameters(net)
    assert float(average.module[2].esper_slot.graft.alpha) == 0.5
    growth.finish()
    assert not any("esper" in type(m).__module__ for m in average.module.modules())


@pytest.mark.parametrize("made", ["before growth", "before the seed", "after the seed", "deep copy"])
def test_copy_passed_to_follow_after_a_germination_receives_that_seed_and_later_seeds(made: str) -> None:
    net = mlp()
    copies = {"before growth": AveragedModel(net)}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    growth = Growth(net, optimizer, sample=X, slots=["1", "2"], controller=None, mode="max")
    copies["before the seed"] = AveragedModel(net)
    growth.germinate("2", "mlp", alpha=0.5)
    step(net, optimizer)
    copies["after the seed"] = AveragedModel(net)
    copies["deep copy"] = copy.deepcopy(net)
    follower = copies[made]
    growth.follow(follower)
    module = follower.module if isinstance(follower, AveragedModel) else follower

    assert [name for name, _ in module.named_parameters()] == [name for name, _ in net.named_parameters()]
    seeds = [dict(each[2].esper_slot.graft.state_dict()) for each in (module, net)]
    torch.testing.assert_close(*seeds, rtol=0.0, atol=0.0)
    if isinstance(follower, AveragedModel):
        follower.update_parameters(net)  # The first update of an averaged model copies all weights.
        assert torch.equal(module(X), net(X))
    growth.germinate("1", "lora")
    growth.prune("2")
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in net.named_parameters()]


def test_copies_given_as_argument_follow_receive_a_seed_that_a_controller_plants() -> None:
    net = mlp()
    average, twin = AveragedModel(net), copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    growth = Growth(
        net, optimizer, sample=X, slots="2", controller="mlp@2:1", follow=[average, twin], mode="max"
    )
    growth.end_epoch(lambda: 1.0)

    names = [name for name, _ in net.named_parameters()]
    assert len(names) == 14
    assert [name for name, _ in average.module.named_parameters()] == names
    assert [name for name, _ in twin.named_parameters()] == names


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copy_of_a_network_with_a_seed_shares_no_tensor_with_the_original(
    copied: Callable[[nn.Module], nn.Module],
) -> None:
    net = mlp()
    growth = Growth(
        net, torch.optim.SGD(net.parameters(), lr=0.1), sample=X, slots="2", controller=None, mode="max"
    )
    growth.germinate("2", "mlp")
    twin = copied(net)
    wanted = twin(X)
    with torch.no_grad():
        for parameter in net[2].esper_slot.parameters():
            parameter.add_(1.0)
    assert torch.equal(twin(X), wanted)
    assert not torch.equal(net(X), wanted)
    growth.prune("2")
    assert len(list(twin.parameters())) == 14


# --- files ----------------------------------------------------------------------------------------------


def run(net: nn.Module, optimizer: Any, growth: Growth, scheduler: Any, epochs: range) -> list[str]:
    said = []
    for _ in epochs:
        for _ in range(4):
            step(net, optimizer, torch.randn(8, 5))
        scheduler.step()
        said += growth.end_epoch(lambda: [-net(X[i::4]).square().mean().item() for i in range(4)])
    return [str(event) for event in said]


def begun() -> tuple[nn.Module, torch.optim.Optimizer, Growth, Any]:
    net = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.2), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    growth = Growth(net, optimizer, sample=X, slots=["0", "2"], controller="auto", mode="max")
    return net, optimizer, growth, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)


def test_user_training_resumed_between_plantings_has_bit_equal_weights_and_the_same_events(
    tmp_path: Path,
) -> None:
    net, optimizer, growth, scheduler = begun()
    said = run(net, optimizer, growth, scheduler, range(12))
    assert any("was planted" in sentence for sentence in said)
    free = next(slot for slot in growth.slots if not any(f"in {slot} was planted" in line for line in said))
    growth.germinate(free, "lora", alpha=0.5)
    run(net, optimizer, growth, scheduler, range(2))
    kept = {
        "growth": growth.state_dict(),
        "net": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
    }
    torch.save(kept, tmp_path / "checkpoint")
    rest = run(net, optimizer, growth, scheduler, range(8))

    torch.manual_seed(5)
    again, optimizer, growth, scheduler = begun()
    kept = torch.load(tmp_path / "checkpoint", weights_only=True)
    growth.load_state_dict(kept["growth"])
    again.load_state_dict(kept["net"])
    optimizer.load_state_dict(kept["optimizer"])
    scheduler.load_state_dict(kept["scheduler"])
    torch.set_rng_state(kept["rng"])
    assert run(again, optimizer, growth, scheduler, range(8)) == rest
    assert list(again.state_dict()) == list(net.state_dict())
    assert all(
        torch.equal(a, b) for a, b in zip(again.state_dict().values(), net.state_dict().values(), strict=True)
    )


# --- processes and compilers ------------------------------------------------------------------------------


def test_weights_of_two_distributed_processes_stay_bit_equal_while_the_network_grows(tmp_path: Path) -> None:
    program = [sys.executable, "tests/growth/two_processes.py", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": ".", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second = ((tmp_path / rank).read_text() for rank in "01")
    assert first == second
    assert "epoch 1: mlp in 1 was planted (560 parameters)\nepoch 1: lora in 2 was planted" in first
    assert "epoch 1: lora in 2 was raised from rank 8 to rank 16" in first


def test_end_epoch_warns_once_if_torch_compile_reaches_its_recompile_limit() -> None:
    net = mlp()
    compiled = torch.compile(net, backend="eager", dynamic=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    growth = Growth(compiled, optimizer, sample=X, slots="2", controller=None, mode="max")
    growth.germinate("2", "mlp")
    with torch._dynamo.config.patch(recompile_limit=2):
        for size in range(1, 5):
            step(compiled, optimizer, X[:size])
    with pytest.warns(GrowthWarning, match=r"torch\.compile reached its recompile limit, and a part of the"):
        growth.end_epoch(lambda: compiled(X[:1]).mean())
    step(compiled, optimizer, X[:1])
    assert [event.kind for event in growth.end_epoch(lambda: compiled(X[:1]).mean())] == ["measured"]


def test_finish_of_a_compiled_network_returns_the_uncompiled_network() -> None:
    net = mlp()
    compiled = torch.compile(net, backend="eager")
    growth = Growth(
        compiled, torch.optim.SGD(net.parameters(), lr=0.1), sample=X, slots="1", controller=None, mode="max"
    )
    growth.germinate("1", "mlp")
    assert growth.finish() is net
    torch.testing.assert_close(compiled(X), net(X))


def test_network_with_a_frozen_backbone_and_a_seed_compiles_to_one_graph() -> None:
    torch._dynamo.reset()  # Another test may have reached the recompile limit of the same code.
    net = mlp()
    net[:4].requires_grad_(False)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    growth = Growth(
        compiled,
        torch.optim.SGD(net[4].parameters(), lr=0.1),
        sample=X,
        slots="1",
        controller=None,
        mode="max",
    )
    growth.germinate("1", "mlp")
    gradients = []
    for network in (compiled, net):
        net.zero_grad()
        network(X).square().sum().backward()
        gradients.append([p.grad.clone() for p in net[1].esper_slot.parameters()])
    torch.testing.assert_close(*gradients)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)  # Inductor uses a deprecated function of torch.jit.
def test_network_is_recompiled_by_inductor_after_a_seed_was_planted() -> None:
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    compiled = torch.compile(net)
    compiled(X)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    growth = Growth(compiled, optimizer, sample=X, slots="0", controller=None, mode="max")
    growth.germinate("0", "lora")
    twin = copy.deepcopy(net)
    for network in (compiled, twin):
        network.zero_grad()
        network(X).square().sum().backward()
    for found, wanted in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad)
        assert found.grad is not None


def test_end_epoch_warns_of_a_deep_copy_that_is_updated_without_the_seeds_of_the_network() -> None:
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    growth = Growth(net, optimizer, sample=X, slots=["0", "2"], controller=None, mode="max")
    average, snapshot = copy.deepcopy(net), copy.deepcopy(net)
    growth.germinate("2", "mlp")
    step(net, optimizer)
    events = growth.end_epoch(lambda: 1.0)
    # A deep copy of the network that is not updated raises no warning.
    assert [event.kind for event in events] == ["measured"]
    growth.germinate("0", "lora")
    step(net, optimizer)
    theirs = dict(net.named_parameters())
    for name, parameter in average.named_parameters():
        parameter.data.lerp_(theirs[name].data, 0.1)
    with pytest.warns(GrowthWarning, match="a copy of the network is updated without having grown with it"):
        growth.end_epoch(lambda: 1.0)
    del snapshot
