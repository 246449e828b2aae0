"""``Growth.finish`` merges linear seeds, leaves other parts of the network unchanged, checks the output."""

import copy
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from esper.growth import Growth, GrowthWarning
from esper.kasmina import Mirrored, register_blueprint
from esper.kasmina.blueprints import unregister_blueprint
from esper.kasmina.plain import plain_on_error
from esper.leyline.errors import BlueprintError, EsperError, HostError
from tests.growth.hf_models import bert, gpt2, tokens
from tests.growth.models import GPT, ResNet, mlp


def planted(net: nn.Module, sample: object, *seeds: tuple[str, str], alpha: float = 1.0) -> Growth:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    growth = Growth(net, optimizer, sample=sample, slots=[slot for slot, _ in seeds], controller=None)
    for slot, blueprint in seeds:
        growth.germinate(slot, blueprint, alpha=alpha)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "esper_slot" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return growth


@pytest.fixture(autouse=True)
def _same_weights() -> None:
    torch.manual_seed(0)


def test_linear_seed_after_a_linear_layer_is_merged_into_its_weight() -> None:
    net, x = mlp(), torch.randn(4, 5)
    keys = list(net.state_dict())
    growth = planted(net, x, ("2", "lora"), alpha=0.5)
    optimizer = growth.network.groups.optimisers[0]
    net(x).sum().backward()
    optimizer.step()
    wanted = net(x)
    net = growth.finish()
    assert list(net.state_dict()) == keys
    torch.testing.assert_close(net(x), wanted, rtol=1e-4, atol=1e-5)
    # Optimiser and state hold the six tensors of three layers; the seed's four tensors are removed.
    assert [len(group["params"]) for group in optimizer.param_groups] == [6]
    assert len(optimizer.state) == 6


def test_linear_seed_is_not_merged_into_a_weight_of_low_precision() -> None:
    net, x = mlp().bfloat16(), torch.randn(64, 5).bfloat16()
    growth = planted(net, x, ("2", "lora"))
    wanted = net(x)
    assert torch.equal(growth.finish()(x), wanted)
    assert any("grown" in name for name in net.state_dict())


def test_linear_seed_is_not_merged_into_a_shared_weight() -> None:
    net, x = GPT(), torch.randint(11, (4, 6))
    growth = planted(net, x, ("lm_head", "lora"))
    wanted, embedded = net.eval()(x)[0], net.wte.weight.clone()
    growth.finish()
    assert torch.equal(net(x)[0], wanted)
    assert torch.equal(net.wte.weight, embedded)


def test_finish_keeps_containers_attributes_and_hooks() -> None:
    net, x = ResNet(), torch.randn(4, 1, 8, 8)
    net.note = "mine"
    calls: list[str] = []
    last = net.layer2[-1]
    last.register_forward_hook(lambda _m, _a, out: calls.append("before") or out * 2)
    growth = planted(net, x, ("layer2", "conv_light"))
    last.register_forward_hook(lambda _m, _a, out: calls.append("after") or out + 1.0)
    wanted = net.eval()(x)
    assert (len(net.layer2), net.layer2[-1] is last) == (2, True)
    growth.finish()
    calls.clear()
    assert torch.equal(net(x), wanted)
    assert calls == ["before", "after"]
    assert (len(net.layer2), net.layer2[-1] is last, net.note) == (2, True, "mine")
    assert [type(child).__name__ for child in net.layer2] == ["BasicBlock", "BasicBlock"]


def test_finished_network_keeps_an_alpha_below_one() -> None:
    net, x = mlp(), torch.randn(4, 5)
    growth = planted(net, x, ("1", "mlp"), alpha=0.25)
    wanted = net(x)
    assert torch.equal(growth.finish()(x), wanted)


def test_finished_network_continues_with_its_optimiser_and_can_grow_again() -> None:
    net, x = mlp(), torch.randn(4, 5)
    growth = planted(net, x, ("1", "mlp"))
    optimizer = growth.network.groups.optimisers[0]
    growth.finish()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    net(x).square().sum().backward()
    optimizer.step()
    assert not [name for name, p in net.named_parameters() if torch.equal(p, before[name])]
    again = Growth(net, optimizer, sample=x)
    # Layers of the finished network are slots; layers inside the merged seed are not.
    assert again.slots == ("0", "2")
    again.finish()
    again = planted(net, x, ("1", "lora"))
    wanted = net(x)
    assert torch.equal(again.finish()(x), wanted)


class Fickle(nn.Module):
    """Network whose output depends on whether it has a slot."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x)) + float(hasattr(self.first, "esper_slot"))


def test_finish_that_would_change_the_output_is_refused_and_names_the_slot() -> None:
    net, x = Fickle(), torch.randn(4, 5)
    growth = planted(net, x, ("first", "mlp"), ("head", "norm"))
    wanted, state = net(x), copy.deepcopy(net.state_dict())
    with pytest.raises(
        HostError, match="slot first: the finished network differs in eval mode without grad from"
    ):
        growth.finish()
    assert torch.equal(net(x), wanted)
    assert list(net.state_dict()) == list(state)
    growth.prune("first")
    growth.prune("head")


class Branching(Mirrored):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, width))

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h) if h.sum() > 0 else super().forward(h) * 1.0


def test_seed_that_cannot_be_traced_is_refused() -> None:
    register_blueprint("branching", topology="features")(Branching)
    try:
        growth = planted(mlp(), torch.randn(4, 5), ("1", "branching"))
        with pytest.raises(
            BlueprintError, match="the forward of Branching cannot be traced into torch modules"
        ):
            growth.finish()
    finally:
        unregister_blueprint("branching", "features")


def test_seed_of_torch_modules_only_is_kept_without_tracing() -> None:
    class Odd(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(width))

        def forward(self, h: Tensor) -> Tensor:
            return h * self.scale if h.sum() > 0 else 2.0 * h * self.scale

    register_blueprint("odd", topology="features")(Odd)
    try:
        net, x = mlp(), torch.randn(4, 5)
        growth = planted(net, x, ("1", "odd"))
        wanted = net(x)
        assert torch.equal(growth.finish()(x), wanted)
    finally:
        unregister_blueprint("odd", "features")


def test_network_that_is_a_container_keeps_length_and_order() -> None:
    net = nn.Sequential(OrderedDict(a=nn.Linear(5, 8), b=nn.ReLU(), c=nn.Linear(8, 3)))
    growth = planted(net, torch.randn(4, 5), ("b", "mlp"))
    assert (len(net), [name for name, _ in net.named_children()]) == (3, ["a", "b", "c"])
    growth.finish()
    assert (len(net), [name for name, _ in net.named_children()]) == (3, ["a", "b", "c"])


def test_merged_transformers_model_is_saved_by_save_pretrained(tmp_path: Path) -> None:
    net, x = bert().eval(), tokens((2,), 3)
    growth = planted(net, x, ("bert.encoder.layer.0.intermediate.dense", "lora"))
    wanted = net(**x).logits
    growth.finish().save_pretrained(tmp_path)
    again = type(net).from_pretrained(tmp_path)
    torch.testing.assert_close(again(**x).logits, wanted, rtol=1e-4, atol=1e-5)


def test_transformers_model_with_seeds_warns_about_save_pretrained() -> None:
    growth = planted(gpt2(), tokens((2, 6), 20), ("transformer.h.0", "mlp"))
    with pytest.warns(
        GrowthWarning, match=r"save_pretrained keeps the class's own layers only.*torch\.save\(net"
    ):
        growth.finish()


def test_second_finish_and_actions_after_finish_are_refused() -> None:
    growth = planted(mlp(), torch.randn(4, 5), ("1", "mlp"))
    growth.finish()
    for use in (
        growth.finish,
        lambda: growth.prune("1"),
        lambda: growth.germinate("1", "mlp"),
        lambda: growth.end_epoch(lambda: 1.0),
    ):
        with pytest.raises(EsperError, match=r"\(\) came after finish\(\): the network is a plain module"):
            use()


def test_error_of_finish_is_added_as_a_note_to_an_earlier_error() -> None:
    def refuse() -> nn.Module:
        raise HostError("it differs")

    with pytest.raises(KeyboardInterrupt) as caught, plain_on_error(refuse):
        raise KeyboardInterrupt
    assert caught.value.__notes__ == ["esper could not make the network plain again: it differs"]
