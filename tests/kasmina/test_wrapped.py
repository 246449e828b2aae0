import copy
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from esper.kasmina import WrappedHost
from esper.leyline import LifecycleOp, Stage, Style
from tests.contracts.matrix import assert_same, germinate, loss, restart
from tests.kasmina.awkward import ResNet, images, net_of, slots_of, wrap
from tests.kasmina.living import act, epoch, grow

KINDS = ["resnet", "unet"]
kinds = pytest.mark.parametrize("kind", KINDS)


# --- where slots go -------------------------------------------------------------------------------


@kinds
def test_slots_are_named_in_any_order_and_lie_in_order_of_execution(kind: str) -> None:
    slots = slots_of(kind)
    host = WrappedHost(net_of(kind), slots[::-1], images(kind)[0])
    assert host.submodule_names == slots
    assert host.slot_config.slot_ids == ("r0c0", "r0c1", "r0c2", "r0c3", "r0c4")
    if kind == "resnet":
        assert host.widths == (4, 4, 4, 8, 8)
        assert (host.feature_shapes[0], host.feature_shapes[-1]) == ((4, 8, 8), (8, 4, 4))


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["layer?.0"], ("layer1.0", "layer2.0")),
        (["layer2.?", "layer1.*.bn1"], ("layer1.0.bn1", "layer1.1.bn1", "layer2.0", "layer2.1")),
        (["layer1", "layer1.1", "layer1"], ("layer1.1", "layer1")),
        ("layer1", ("layer1",)),
    ],
)
def test_slots_by_pattern(patterns: Sequence[str], names: tuple[str, ...]) -> None:
    assert WrappedHost(ResNet(), patterns, images("resnet")[0]).submodule_names == names


@kinds
def test_wrapping_looks_without_touching(kind: str) -> None:
    net = net_of(kind).train()
    mixed = net.get_submodule("layer1" if kind == "resnet" else "down1").eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    modes = [module.training for module in net.modules()]
    position = torch.get_rng_state()
    host = WrappedHost(net, slots_of(kind), images(kind)[0])
    assert_same(net.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), position)
    assert [module.training for module in net.modules()] == modes
    assert not mixed.training
    assert not any(module._forward_hooks for module in net.modules()), "slots attach with the model"
    assert all(p.grad is None for p in host.parameters())


@kinds
def test_a_wrapped_module_keeps_its_keys_and_its_behaviour(kind: str) -> None:
    bare, trial = net_of(kind), wrap(kind)
    host = trial.model.host
    assert isinstance(host, WrappedHost)
    assert list(host.module.state_dict()) == list(bare.state_dict())
    x, _ = images(kind)
    for mode in (True, False):
        restart(5)
        wanted = bare.train(mode)(x)
        restart(5)
        assert torch.equal(trial.model.train(mode)(x), wanted)
    germinate(trial.model, "conv_heavy", Style.GATED_GATE, slot=1)
    assert list(host.module.state_dict()) == list(bare.state_dict())


# --- what an empty slot costs -----------------------------------------------------------------------


class OperationCounter(TorchDispatchMode):
    """Counts everything that torch is asked to do, the backward included."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(module: nn.Module, x: Tensor, y: Tensor) -> int:
    module.train()
    with OperationCounter() as counter:
        loss(module(x), y).backward()
    return counter.count


@kinds
def test_empty_slots_dispatch_no_operation(kind: str) -> None:
    x, y = images(kind)
    bare, trial = net_of(kind), wrap(kind)
    wanted = operations(bare, x, y)
    assert operations(trial.model, x, y) == wanted > 50
    germinate(trial.model, "conv_light", Style.LINEAR_ADD, slot=1)
    assert operations(trial.model, x, y) > wanted, "an incubating seed is heard"
    epoch(trial, x, y)
    assert act(trial, LifecycleOp.PRUNE, 1).succeeded
    assert operations(trial.model, x, y) == wanted


# --- an episode on an awkward module ----------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("style", Style)
def test_seeds_live_at_every_slot_at_once(kind: str, style: Style) -> None:
    """Autograd would raise where something overwrites what a backward needs."""
    trial = wrap(kind)
    x, y = images(kind)
    for slot, blueprint in enumerate(("conv_light", "norm", "conv_small", "depthwise", "conv_heavy")):
        assert germinate(trial.model, blueprint, style, slot).succeeded
    stages = []
    for _ in range(4):
        stages.append({Stage(int(stage)) for stage in trial.model.table.stage[0]})
        assert not epoch(trial, x, y).skipped
    assert stages == [{Stage.TRAINING}, *[{Stage.BLENDING}] * 3]
    for slot in range(5):
        trial.model.table.record_contribution(0, slot, 1.0, 0.1)
        assert act(trial, LifecycleOp.FOSSILIZE, slot).succeeded
    assert trial.model.blended == [0, 1, 2, 3, 4]
    losses = [epoch(trial, x, y).loss for _ in range(8)]
    assert losses[-1] < losses[0], "and the grown network learns"


@pytest.mark.parametrize("incubation", ["shadow", "straight_through"])
def test_outside_a_forward_pass_the_module_is_the_users_own(incubation: str) -> None:
    trial = wrap("resnet", incubation=incubation)
    host = trial.model.host
    assert isinstance(host, WrappedHost)
    x, y = images("resnet")
    germinate(trial.model, "conv_light", Style.LINEAR_ADD, slot=1)
    grow(trial, 3, "conv_light", Style.LINEAR_ADD, x, y)
    bare = net_of("resnet").eval()
    bare.load_state_dict(host.module.state_dict())
    trial.model.eval()
    assert not torch.equal(trial.model(x), bare(x))
    assert torch.equal(host.module(x), bare(x))
    with pytest.raises(RuntimeError, match="channels"):
        trial.model(torch.zeros(2, 7, 8, 8))
    assert not any(trial.model.slot(i).engaged for i in range(5)), "not even after a pass that failed"


# --- copies -------------------------------------------------------------------------------------------


@kinds
def test_deepcopy_and_pickle_have_hooks_of_their_own(kind: str) -> None:
    trial = wrap(kind)
    x, y = images(kind)
    grow(trial, 1, "conv_heavy", Style.GATED_GATE, x, y)
    germinate(trial.model, "norm", Style.LINEAR_ADD, slot=2)
    wanted = trial.model.eval()(x)
    for twin in (copy.deepcopy(trial), pickle.loads(pickle.dumps(trial))):
        assert torch.equal(twin.model.eval()(x), wanted)
        with torch.no_grad():
            for weight in twin.model.slot(1).parameters():
                weight.zero_()
        assert not torch.equal(twin.model(x), wanted), "its own seed is heard"
        assert torch.equal(trial.model(x), wanted), "and nobody else's"
        epoch(twin, x, y)


def test_a_hook_added_after_unpickling_does_not_take_a_slots_place(monkeypatch: pytest.MonkeyPatch) -> None:
    # A new process numbers its hooks from 0 again.
    monkeypatch.setattr(RemovableHandle, "next_id", 0)
    trial = wrap("resnet", slots=("layer1.0",))
    x, y = images("resnet")
    grow(trial, 0, "conv_light", Style.LINEAR_ADD, x, y)
    wanted, packed = trial.model.eval()(x), pickle.dumps(trial.model)
    monkeypatch.setattr(RemovableHandle, "next_id", 0)
    model = pickle.loads(packed)
    for _ in range(3):
        model.host.module.layer1[0].register_forward_hook(lambda *_: None)
    assert torch.equal(model(x), wanted)
