"""New hidden units between two layers of a user's network (blueprint ``widen``)."""

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.growth.growth import Growth
from esper.kasmina.compute import count_units
from esper.kasmina.widening import Pair
from esper.leyline.errors import BlueprintError, EsperError, GrowthWarning
from esper.tolaria.env import MorphEnv
from esper.tolaria.tasks import module_task
from tests.growth.hf_models import gpt2
from tests.growth.models import VGG, WORDS, GatedMLP, MobileNet, OneBlock, PlainCNN, ResNet, ViT
from tests.tolaria.building import WAIT, plant

TOKENS = torch.randint(WORDS, (4, 6), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
VECTORS = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))


def tokens_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor, str, int]] = {
    "gated MLP": (GatedMLP, VECTORS, "up", 3),
    "transformer block": (OneBlock, TOKENS, "blocks.0", 8),
    "plain MLP": (tokens_mlp, VECTORS, "0", 4),
    "residual block with BatchNorm": (ResNet, IMAGES, "layer2.0", 4),
    "CNN": (PlainCNN, IMAGES, "conv2", 3),
    "VGG with pooling": (VGG, IMAGES, "features.0", 2),
    "TransformerEncoderLayer": (ViT, IMAGES, "encoder.layers.1", 8),
}
"""Network, input, slot, and number of new hidden units."""
every_network = pytest.mark.parametrize("name", NETWORKS)


def step(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(net, x).backward()
    optimizer.step()


def loss_of(net: nn.Module, x: Tensor) -> Tensor:
    output = net(x)
    return (output - torch.linspace(-1, 1, output.shape[-1])).square().mean()


def trained(name: str, rate: float = 1e-2) -> tuple[nn.Module, torch.optim.Optimizer, Tensor, str]:
    torch.manual_seed(0)
    build, x, slot, _ = NETWORKS[name]
    net = build()
    optimizer = torch.optim.Adam(net.parameters(), lr=rate)
    for _ in range(5):
        step(net, optimizer, x)
    return net, optimizer, x, slot


def growing(net: nn.Module, optimizer: Any, x: Any, slot: Any, **settings: Any) -> Growth:
    return Growth(net, optimizer, sample=x, slots=slot, controller=None, mode="max", **settings)


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    net.eval()
    with torch.no_grad():
        yield
    net.train()


def output_of(net: nn.Module, x: Tensor) -> Tensor:
    with evaluating(net):
        return net(x)


def run_without_esper(code: str, *arguments: Any) -> None:
    # transformers loads the entry points of torchrun, of which one is in esper.scripts.
    code = "import torch; torch.set_num_threads(1); " + code
    code += (
        "; import sys; assert not [m for m in sys.modules if m.startswith(('esper.kasmina', 'esper.growth'))]"
    )
    path = {"PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code, *map(str, arguments)], check=True, env=path)


# --- on trial -----------------------------------------------------------------------------------------------


@every_network
def test_new_units_leave_the_output_bit_equal_at_birth_and_then_learn(name: str) -> None:
    net, optimizer, x, slot = trained(name)
    before, growth = output_of(net, x), growing(net, optimizer, x, slot)
    growth.germinate(slot, "widen")
    assert torch.equal(output_of(net, x), before)
    seed = growth.network.slots[0].seed
    assert seed.outer.weight.shape[1] == NETWORKS[name][3]
    start = copy.deepcopy(seed.state_dict())
    for _ in range(3):
        step(net, optimizer, x)
    assert all(not torch.equal(value, start[key]) for key, value in seed.state_dict().items())


def test_incoming_weights_start_with_the_root_mean_square_of_the_layer() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(50, 80), nn.ReLU(), nn.Linear(80, 3))
    with torch.no_grad():
        net[0].weight.mul_(7)
    growth = growing(net, None, torch.randn(2, 50), "0")
    growth.germinate("0", "widen")
    new = growth.network.slots[0].seed.inner[0].weight
    assert new.std().item() == pytest.approx(net[0].weight.square().mean().sqrt().item(), rel=0.05)


@every_network
def test_alpha_zero_and_a_pruned_seed_give_the_old_network_bit_for_bit(name: str) -> None:
    net, optimizer, x, slot = trained(name)
    growth = growing(net, optimizer, x, slot)
    growth.germinate(slot, "widen")
    with torch.no_grad():
        growth.network.slots[0].seed.outer.weight.normal_()
    plain = NETWORKS[name][0]()
    own = {key: value for key, value in net.state_dict().items() if "esper_slot" not in key}
    plain.load_state_dict(own)
    assert not torch.equal(output_of(net, x), output_of(plain, x))
    growth.set_alpha(slot, 0.0)
    for mode in (True, False):
        torch.manual_seed(1)
        wanted = plain.train(mode)(x)
        torch.manual_seed(1)
        assert torch.equal(net.train(mode)(x), wanted)
    growth.prune(slot)
    assert torch.equal(output_of(net, x), output_of(plain, x))
    assert net.state_dict().keys() == plain.state_dict().keys()
    assert not [m for m in net.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert len(optimizer.param_groups[0]["params"]) == len(list(plain.parameters()))


def test_alpha_scales_the_contribution_of_the_units() -> None:
    net, optimizer, x, slot = trained("gated MLP")
    growth = growing(net, optimizer, x, slot)
    growth.germinate(slot, "widen", alpha=0.5)
    seed = growth.network.slots[0].seed
    with torch.no_grad():
        seed.outer.weight.normal_()
        old = F.silu(net.gate.weight @ x.T + net.gate.bias[:, None]).T * (x @ net.up.weight.T + net.up.bias)
        new = F.silu(seed.inner[0](x)) * seed.inner[1](x)
        hidden = x + old @ net.down.weight.T + net.down.bias + 0.5 * seed.outer(new)
        assert torch.allclose(net(x), net.head(hidden), atol=1e-6)


def test_contribution_of_the_units_is_the_change_of_the_metric_without_them() -> None:
    net, optimizer, x, slot = trained("gated MLP")

    def evaluate() -> list[float]:
        return [-loss_of(net, each).item() for each in x.split(1)]

    growth = growing(net, optimizer, x, slot)
    old = sum(evaluate()) / len(x)
    growth.germinate(slot, "widen")
    for parameter in growth.network.host_parameters():
        parameter.requires_grad_(False)
    for _ in range(3):
        step(net, optimizer, x)
    [event] = [e for e in growth.measure(evaluate) if e.kind == "measured"]
    assert event.contribution == pytest.approx(sum(evaluate()) / len(x) - old)
    assert event.contribution > 0


@every_network
def test_incubating_units_learn_without_changing_the_output(name: str) -> None:
    net, optimizer, x, slot = trained(name)
    before, growth = output_of(net, x), growing(net, optimizer, x, slot, incubation_epochs=2)
    growth.germinate(slot, "widen")
    seed = growth.network.slots[0].seed
    for _ in range(2):
        optimizer.zero_grad()
        growth.incubate(lambda: loss_of(net, x))
        optimizer.step()
    assert seed.outer.weight.any()
    assert all(p.grad is None for p in growth.network.host_parameters())
    own = {key: value for key, value in net.state_dict().items() if "esper_slot" not in key}
    plain = NETWORKS[name][0]()
    plain.load_state_dict(own)
    assert torch.equal(output_of(plain, x), before)
    assert torch.equal(output_of(net, x), before)


def test_flops_of_the_units_are_those_of_a_wider_network() -> None:
    for name in ("CNN", "transformer block", "VGG with pooling"):
        net, optimizer, x, slot = trained(name)
        growth = growing(net, optimizer, x, slot)
        before = growth.flops
        growth.germinate(slot, "widen")
        added = growth.flops - before
        assert len(x) * count_units(growth.network.slots[0].graft).forward == added
        growth.finish()
        wider = growing(net, optimizer, x, slot)
        assert wider.flops == before + added


def test_followed_average_receives_the_units_and_becomes_wider_with_the_network() -> None:
    net, optimizer, x, slot = trained("CNN")
    average = AveragedModel(net, use_buffers=True)
    growth = growing(net, optimizer, x, slot, follow=[average])
    growth.germinate(slot, "widen")
    for _ in range(3):
        step(net, optimizer, x)
    average.n_averaged.zero_()
    average.update_parameters(net)
    assert torch.equal(output_of(average, x), output_of(net, x))
    growth.finish()
    assert torch.equal(output_of(average, x), output_of(net, x))
    assert average.module.norm.num_features == 9
    assert not [m for m in average.modules() if m._forward_hooks or m._forward_pre_hooks]


def test_copies_of_the_network_run_their_own_units() -> None:
    net, optimizer, x, slot = trained("CNN")
    growth = growing(net, optimizer, x, slot)
    growth.germinate(slot, "widen")
    for _ in range(2):
        step(net, optimizer, x)
    wanted, twin = output_of(net, x), copy.deepcopy(net)
    with torch.no_grad():
        growth.network.slots[0].seed.outer.weight.zero_()
    assert torch.equal(output_of(twin, x), wanted)
    assert not torch.equal(output_of(net, x), wanted)


# --- permanent units ----------------------------------------------------------------------------------------


@every_network
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_finished_network_is_wider_and_equal_in_a_process_without_esper(tmp_path, name, alpha) -> None:
    net, optimizer, x, slot = trained(name)
    names = list(net.state_dict())
    growth = growing(net, optimizer, x, slot)
    growth.germinate(slot, "widen", alpha=alpha)
    for _ in range(3):
        step(net, optimizer, x)
    loss = loss_of(net, x)  # The loss remains referenced, as in a training loop.
    wanted = output_of(net, x)
    assert growth.finish() is net
    found = output_of(net, x)
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert list(net.state_dict()) == names
    assert not [m for m in net.modules() if type(m).__module__.startswith("esper")]
    assert not [m for m in net.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in net.parameters()]
    step(net, optimizer, x)
    assert loss.isfinite()
    torch.save({"net": net.eval(), "x": x, "wanted": net(x)}, tmp_path / "net.pt")
    code = (
        "import sys, torch; d = torch.load(sys.argv[1], weights_only=False);"
        " assert torch.equal(d['net'](d['x']), d['wanted'])"
    )
    run_without_esper(code, tmp_path / "net.pt")


def test_layers_state_their_new_sizes() -> None:
    net, optimizer, x, slot = trained("CNN")
    growth = growing(net, optimizer, x, slot)
    growth.germinate(slot, "widen")
    growth.finish()
    assert (net.conv2.out_channels, net.norm.num_features, net.conv3.in_channels) == (9, 9, 9)
    assert len(net.norm.running_mean) == len(net.norm.running_var) == 9
    net, optimizer, x, slot = trained("gated MLP")
    growth = growing(net, optimizer, x, slot)
    growth.germinate(slot, "widen")
    growth.finish()
    assert (net.gate.out_features, net.up.out_features, net.down.in_features) == (9, 9, 9)


def test_adam_step_after_finish_equals_a_reference_for_old_and_new_units() -> None:
    net, optimizer, x, slot = trained("gated MLP", rate := 1e-2)
    growth = growing(net, optimizer, x, slot)
    growth.germinate(slot, "widen")
    for _ in range(3):
        step(net, optimizer, x)
    seed = growth.network.slots[0].seed
    states = {
        "up.weight": (net.up.weight, seed.inner[1].weight, 0),
        "up.bias": (net.up.bias, seed.inner[1].bias, 0),
        "down.weight": (net.down.weight, seed.outer.weight, 1),
    }
    before = {
        name: [copy.deepcopy((p.detach(), optimizer.state[p])) for p in (old, new)]
        for name, (old, new, _) in states.items()
    }
    growth.finish()
    optimizer.zero_grad()
    loss_of(net, x).backward()
    gradients = {name: net.get_parameter(name).grad.clone() for name in states}
    optimizer.step()
    for name, parts in before.items():
        axis = states[name][2]
        sizes = [values.shape[axis] for values, _ in parts]
        found = net.get_parameter(name).detach().split(sizes, axis)
        for (values, state), gradient, after in zip(
            parts, gradients[name].split(sizes, axis), found, strict=True
        ):
            old_steps, steps = float(parts[0][1]["step"]), float(state["step"])
            # Averages of the same bias-corrected values, for the number of steps of the old units.
            mean = state["exp_avg"] / (1 - 0.9**steps) * (1 - 0.9**old_steps)
            square = state["exp_avg_sq"] / (1 - 0.999**steps) * (1 - 0.999**old_steps)
            mean = 0.9 * mean + 0.1 * gradient
            square = 0.999 * square + 0.001 * gradient**2
            mean, square = mean / (1 - 0.9 ** (old_steps + 1)), square / (1 - 0.999 ** (old_steps + 1))
            wanted = values - rate * mean / (square.sqrt() + 1e-8)
            assert torch.allclose(after, wanted, rtol=1e-4, atol=1e-6)
    assert [float(parts[0][1]["step"]) for parts in before.values()] == [8.0] * 3
    assert [float(parts[1][1]["step"]) for parts in before.values()] == [3.0] * 3


def test_momentum_of_sgd_is_joined_and_a_factored_state_is_dropped() -> None:
    torch.manual_seed(0)
    net = tokens_mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    step(net, optimizer, VECTORS)
    growth = growing(net, optimizer, VECTORS, "0")
    growth.germinate("0", "widen")
    step(net, optimizer, VECTORS)
    old = optimizer.state[net[0].weight]["momentum_buffer"].clone()
    new = optimizer.state[growth.network.slots[0].seed.inner[0].weight]["momentum_buffer"].clone()
    optimizer.state[net[2].weight] = {"row": torch.ones(6), "step": 3}
    growth.finish()
    assert torch.equal(optimizer.state[net[0].weight]["momentum_buffer"], torch.cat([old, new]))
    assert net[2].weight not in optimizer.state
    step(net, optimizer, VECTORS)


def test_pairs_that_share_a_layer_are_widened_together() -> None:
    for order in (("conv1", "conv2"), ("conv2", "conv1")):
        net, optimizer, x, _ = trained("CNN")
        before, growth = output_of(net, x), growing(net, optimizer, x, ["conv1", "conv2"])
        for slot in order:
            growth.germinate(slot, "widen")
        assert torch.equal(output_of(net, x), before)
        for _ in range(3):
            step(net, optimizer, x)
        wanted = output_of(net, x)
        growth.finish()
        assert net.conv2.weight.shape == (9, 6, 3, 3)
        assert torch.allclose(output_of(net, x), wanted, rtol=1e-4, atol=1e-5)
        step(net, optimizer, x)


def test_finished_network_can_be_widened_again() -> None:
    net, optimizer, x, slot = trained("CNN")
    for wanted in (9, 13):
        growth = growing(net, optimizer, x, slot)
        growth.germinate(slot, "widen")
        step(net, optimizer, x)
        before = output_of(net, x)
        growth.finish()
        assert net.conv2.out_channels == wanted
        assert torch.allclose(output_of(net, x), before, rtol=1e-4, atol=1e-5)
        step(net, optimizer, x)


def test_failed_finish_leaves_units_on_trial() -> None:
    net, optimizer, x, slot = trained("CNN")
    growth = growing(net, optimizer, x, slot)
    growth.germinate(slot, "widen")
    for _ in range(2):
        step(net, optimizer, x)
    wanted, parameters = output_of(net, x), list(net.parameters())
    state = copy.deepcopy(optimizer.state_dict())
    for error in (KeyboardInterrupt, RuntimeError):

        def fail(*_: Any, error: type[BaseException] = error) -> None:
            if net.conv3.in_channels > 6:
                raise error

        handle = net.head.register_forward_hook(fail)
        with pytest.raises(error):
            growth.finish()
        handle.remove()
        assert torch.equal(output_of(net, x), wanted)
        assert all(one is other for one, other in zip(net.parameters(), parameters, strict=True))
        sizes = net.conv2.out_channels, net.norm.num_features, net.conv3.in_channels
        assert sizes == (6, 6, 6)
        assert str(optimizer.state_dict()) == str(state)
    growth.finish()
    assert net.conv3.in_channels == 9


# --- state --------------------------------------------------------------------------------------------------


def test_saved_network_with_units_loads_as_a_wider_network(tmp_path) -> None:
    net, optimizer, x, slot = trained("CNN")
    growth = growing(net, optimizer, x, slot)
    growth.germinate(slot, "widen")
    for _ in range(3):
        step(net, optimizer, x)
    growth.save(tmp_path / "grown.pt")
    loaded = esper.load(tmp_path / "grown.pt", base=PlainCNN())
    assert torch.allclose(output_of(loaded, x), output_of(net, x), rtol=1e-4, atol=1e-5)
    assert loaded.conv2.out_channels == 9


def test_state_of_growth_network_and_optimiser_resume_bit_equal() -> None:
    net, optimizer, x, slot = trained("CNN")
    growth = growing(net, optimizer, x, slot)
    growth.germinate(slot, "widen")
    step(net, optimizer, x)
    torch.manual_seed(5)
    other = PlainCNN()
    second = torch.optim.Adam(other.parameters(), lr=1e-2)
    again = growing(other, second, x, slot)
    again.load_state_dict(growth.state_dict())
    other.load_state_dict(copy.deepcopy(net.state_dict()))
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, its in ((net, optimizer), (other, second)):
        step(each, its, x)
    assert torch.equal(output_of(net, x), output_of(other, x))


def loader(count: int) -> DataLoader:
    x = torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(count))
    return DataLoader(TensorDataset(x, (x.mean((1, 2, 3)) > 0).long()), batch_size=16)


def test_grow_plants_planned_units_and_resumes_bit_equal_after_a_stop(tmp_path) -> None:
    def grow(**settings: Any) -> Any:
        net, optimizer, _, _ = trained("CNN")
        plan = {"epochs": 4, "controller": "widen@conv2:1", "loss": F.cross_entropy, "slots": "conv2"}
        return esper.grow(net, loader(64), loader(32), optimizer=optimizer, **plan, **settings)

    def stop(line: str) -> None:
        if line.startswith("epoch 2"):
            raise KeyboardInterrupt

    whole = grow(show=lambda _: None)
    assert whole.net.conv2.out_channels == 9
    with pytest.raises(KeyboardInterrupt):
        grow(show=stop, out=tmp_path / "run")
    resumed = grow(show=lambda _: None, out=tmp_path / "run", resume=True)
    pairs = zip(resumed.net.parameters(), whole.net.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_interrupted_grow_leaves_a_wider_network_and_its_optimiser() -> None:
    def stop(line: str) -> None:
        if line.startswith("epoch 3"):
            raise KeyboardInterrupt

    net, optimizer, x, _ = trained("CNN")
    plan = {"epochs": 4, "controller": "widen@conv2:1", "loss": F.cross_entropy, "slots": "conv2"}
    with pytest.raises(KeyboardInterrupt):
        esper.grow(net, loader(64), loader(32), optimizer=optimizer, show=stop, **plan)
    assert net.conv2.out_channels == 9
    assert not [m for m in net.modules() if m._forward_hooks or m._forward_pre_hooks]
    step(net, optimizer, x)


def test_rollback_restores_the_units() -> None:
    net, optimizer, x, slot = trained("CNN")
    growth = growing(net, optimizer, x, slot, rollback=True)
    growth.germinate(slot, "widen")
    step(net, optimizer, x)
    kept = growth.recovery._trained.weights()
    wanted = output_of(net, x)
    growth.prune(slot)
    step(net, optimizer, x)
    growth.recovery._trained.load_weights(kept)
    assert torch.equal(output_of(net, x), wanted)


def test_environment_of_a_users_task_widens_a_pair_and_continues_from_its_state() -> None:
    y = torch.arange(160) % 3
    x = y.view(-1, 1, 1, 1) + torch.randn(160, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    sizes = {"batch_size": 16, "batches_per_epoch": 2, "horizon": 6}
    task = module_task(PlainCNN, x, y, name="cnn", slots=["conv2"], **sizes)
    one, other = MorphEnv(task, rng_seed=0), MorphEnv(task, rng_seed=0)
    one.reset()
    other.reset()
    widen = one.action_space.blueprint_names.index("widen")
    first = one.step(plant(0, widen))
    assert first.last_success
    refused = other.step(plant(0, widen, style=3))
    assert not refused.last_success
    assert other.model.slots[0].graft is None
    before, after = one.host.meter.per_sample()
    assert after - before == count_units(one.model.slots[0].graft).forward
    other.load_state(one.state())
    for _ in range(2):
        assert one.step(WAIT).val_loss == other.step(WAIT).val_loss
    fresh = MorphEnv(task, rng_seed=0)
    fresh.reset()
    one.load_state(fresh.state())
    assert one.model.slots[0].graft is None
    assert not [m for m in one.model.host.modules() if m._forward_pre_hooks]


# --- races and diagnosis ------------------------------------------------------------------------------------


def test_diagnose_offers_widen_and_plant_adds_the_units() -> None:
    net, optimizer, x, _ = trained("CNN")
    before = output_of(net, x)
    settings = {"loss": F.cross_entropy, "optimizer": optimizer, "steps": 300}
    diagnosis = esper.diagnose(net, loader(128), loader(64), **settings)
    found = {(row.place, row.blueprint) for row in diagnosis.rows}
    assert {("conv1", "widen"), ("conv2", "widen")} <= found
    assert ("norm", "widen") not in found
    assert torch.equal(output_of(net, x), before)
    grown = esper.plant(copy.deepcopy(net), "conv1", "widen", sample=x)
    assert grown.conv1.out_channels == 6
    assert torch.allclose(output_of(grown, x), before, rtol=1e-4, atol=1e-5)


def test_race_in_grow_tries_wider_layers() -> None:
    net, optimizer, _, _ = trained("CNN")
    grown = esper.grow(
        net,
        loader(512),
        loader(128),
        loss=F.cross_entropy,
        epochs=12,
        optimizer=optimizer,
        show=lambda _: None,
    )
    raced = [event for event in grown.events if event.kind == "raced"]
    assert raced
    assert isinstance(grown.net, PlainCNN)


def test_candidates_at_a_pair_on_trial_exclude_side_modules_that_would_receive_its_units() -> None:
    net, optimizer, x, _ = trained("CNN")
    growth = growing(net, optimizer, x, ["conv1", "conv2", "norm"])
    growth.germinate("conv2", "widen")
    with pytest.raises(
        BlueprintError, match="'conv_light' at slot norm and the seed of slot conv2 change the"
    ):
        growth.germinate("norm", "conv_light")
    growth.germinate("conv1", "conv_light")
    growth.prune("conv2")
    growth.germinate("norm", "conv_light")
    with pytest.raises(BlueprintError, match="the seed of slot norm change the same hidden units"):
        growth.germinate("conv2", "widen")


# --- refusals -----------------------------------------------------------------------------------------------


class HiddenLayerNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.norm(self.a(x))))


class HiddenSoftmax(HiddenLayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x).softmax(-1)))


class Tied(HiddenLayerNorm):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(6, 5)
        self.again.weight = self.b.weight

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        return self.head(self.b(h) + self.again(h))


class TwoReaders(HiddenLayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        return self.head(self.b(h)) + h.mean(-1, keepdim=True)


class Quantised(HiddenLayerNorm):
    def __init__(self) -> None:
        super().__init__()
        self.b.weight = nn.Parameter(torch.ones(5, 6, dtype=torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(F.relu(self.a(x)), self.b.weight.float()) + 0 * self.b.bias)


class Wrapped(HiddenLayerNorm):
    """Network whose second layer has a computed weight."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.b)


@pytest.mark.parametrize(
    ("build", "x", "slot", "reason"),
    [
        (
            HiddenLayerNorm,
            VECTORS,
            "a",
            "forward pass of the network fails with new hidden units between 'a'",
        ),
        (HiddenSoftmax, VECTORS, "a", "change the output although their outgoing weights are zero"),
        (Tied, VECTORS, "a", "the weight of 'b' is shared with another module"),
        (TwoReaders, VECTORS, "a", "change the output although their outgoing weights are zero"),
        (Wrapped, VECTORS, "a", "no Linear takes the outputs of 'a' as its inputs"),
        (HiddenLayerNorm, VECTORS, "head", "no Linear takes the outputs of 'head' as its inputs"),
        (MobileNet, IMAGES, "features.1", "fails with new hidden units .* Given groups=8"),
        (gpt2, {"input_ids": TOKENS}, "transformer.h.0", "layers of the class Conv1D of transformers"),
    ],
)
def test_networks_that_cannot_be_widened_are_refused_with_a_reason(build, x, slot, reason) -> None:
    torch.manual_seed(0)
    net = build()
    keys = list(net.state_dict())
    growth = growing(net, None, x, slot)
    with pytest.raises(BlueprintError, match=f"adds hidden units between two layers.*({reason})"):
        growth.germinate(slot, "widen")
    assert list(net.state_dict()) == keys
    assert not [m for m in net.modules() if m._forward_hooks or m._forward_pre_hooks]


def test_quantised_weight_is_refused() -> None:
    net = Quantised()
    net.b.forward = lambda h: F.linear(h, net.b.weight.float())
    net.forward = lambda x: net.head(net.b(F.relu(net.a(x))))
    growth = growing(net, None, VECTORS, "a")
    with pytest.raises(BlueprintError, match=r"the weight of 'b' is quantised \(torch.int8\)"):
        growth.germinate("a", "widen")


def test_attention_is_refused_and_the_block_is_widened_in_its_mlp() -> None:
    net, optimizer, x, _ = trained("transformer block")
    growth = growing(net, optimizer, x, ["blocks.0", "blocks.0.qkv", "blocks.0.out"])
    with pytest.raises(BlueprintError, match=r"blocks\.0\.qkv"):
        growth.germinate("blocks.0.qkv", "widen")
    assert growth.network.sites[-1].pair.first == ("blocks.0.up",)


def test_styles_other_than_addition_are_refused() -> None:
    net, optimizer, x, slot = trained("gated MLP")
    growth = growing(net, optimizer, x, slot)
    with pytest.raises(EsperError, match="style gated_gate cannot blend new hidden units; choose linear_add"):
        growth.germinate(slot, "widen", style="gated_gate")
    assert growth.network.slots[0].graft is None


def test_diagnosis_that_is_limited_to_widen_names_the_reason_if_nothing_can_be_widened() -> None:
    net = HiddenSoftmax()
    x = torch.randn(32, 5)
    data = DataLoader(TensorDataset(x, torch.zeros(32, 3)), batch_size=16)
    with pytest.raises(BlueprintError, match="outgoing weights are zero"):
        esper.diagnose(net, data, data, loss=F.mse_loss, blueprints=["widen"], slots="a")


def test_plain_values_of_a_pair_can_be_restored() -> None:
    net, optimizer, x, slot = trained("CNN")
    pair = growing(net, optimizer, x, slot).network.sites[0].pair
    assert Pair.of(pair.plain()) == pair


# --- models of transformers ---------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 16,
    "use_cache": False,
}
TEXT = torch.randint(2, 20, (2, 6), generator=torch.Generator().manual_seed(0))


def hf_model(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def hf_loss(net: Any) -> Tensor:
    return net(input_ids=TEXT, labels=TEXT).loss


@pytest.mark.parametrize(
    ("kind", "slot"),
    [("Llama", "model.layers.1"), ("Phi", "model.layers.1"), ("GPTNeoX", "gpt_neox.layers.1")],
)
def test_saved_widened_model_equals_the_trained_one_in_a_process_without_esper(tmp_path, kind, slot) -> None:
    net = hf_model(kind)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    growth = growing(net, optimizer, {"input_ids": TEXT}, slot)
    growth.germinate(slot, "widen")
    for _ in range(3):
        optimizer.zero_grad()
        hf_loss(net).backward()
        optimizer.step()
    with evaluating(net):
        wanted = net(input_ids=TEXT).logits
    growth.finish()
    assert net.config.intermediate_size == 24
    with evaluating(net):
        found = net(input_ids=TEXT).logits
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)
    wider = {tuple(p.shape) for p in net.parameters() if 24 in p.shape}
    assert (24, 8) in wider
    assert not [p for p in net.parameters() if 16 in p.shape]
    state = {tuple(s["exp_avg"].shape) == tuple(p.shape) for p, s in optimizer.state.items()}
    assert state == {True}
    assert len(optimizer.state) == len(list(net.parameters()))
    net.save_pretrained(tmp_path / "model")
    torch.save({"x": TEXT, "wanted": found}, tmp_path / "wanted.pt")
    code = (
        f"import sys, torch; from transformers import {kind}ForCausalLM as Model;"
        " net = Model.from_pretrained(sys.argv[1]).eval(); d = torch.load(sys.argv[2]);"
        " assert torch.equal(net(input_ids=d['x']).logits, d['wanted'])"
    )
    run_without_esper(code, tmp_path / "model", tmp_path / "wanted.pt")
    optimizer.zero_grad()
    hf_loss(net).backward()
    optimizer.step()
    second = growing(net, optimizer, {"input_ids": TEXT}, slot)
    second.germinate(slot, "stack")
    second.finish()
    assert net.config.num_hidden_layers == 4


def test_failed_finish_restores_the_configuration_of_a_model() -> None:
    net = hf_model("Llama")
    growth = growing(net, torch.optim.AdamW(net.parameters()), {"input_ids": TEXT}, "model.layers.1")
    growth.germinate("model.layers.1", "widen")

    def fail(*_: Any) -> None:
        if net.config.intermediate_size > 16:
            raise KeyboardInterrupt

    handle = net.lm_head.register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        growth.finish()
    handle.remove()
    assert net.config.intermediate_size == net.model.layers[0].mlp.intermediate_size == 16
    assert net.model.layers[0].mlp.up_proj.weight.shape == (16, 8)
    growth.finish()
    assert net.config.intermediate_size == net.model.layers[0].mlp.intermediate_size == 24


def test_block_and_units_grow_in_one_model() -> None:
    net = hf_model("Llama")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    growth = growing(net, optimizer, {"input_ids": TEXT}, ["model.layers.0", "model.layers.2"])
    growth.germinate("model.layers.0", "stack")
    growth.germinate("model.layers.2", "widen")
    for _ in range(2):
        optimizer.zero_grad()
        hf_loss(net).backward()
        optimizer.step()
    with evaluating(net):
        wanted = net(input_ids=TEXT).logits
    growth.finish()
    assert (net.config.num_hidden_layers, net.config.intermediate_size) == (4, 24)
    assert {layer.mlp.up_proj.out_features for layer in net.model.layers} == {24}
    with evaluating(net):
        assert torch.allclose(net(input_ids=TEXT).logits, wanted, rtol=1e-4, atol=1e-5)


def test_model_without_an_attribute_for_its_hidden_units_warns_at_finish() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    net = transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=20, hidden_size=8, n_layer=2, n_head=2, use_cache=False)
    )
    growth = growing(net, None, {"input_ids": TEXT}, "transformer.h.0")
    growth.germinate("transformer.h.0", "widen")
    with pytest.warns(GrowthWarning, match="save_pretrained"):
        growth.finish()
