"""``Growth.finish`` merges linear seeds, leaves other modules unchanged and compares the outputs."""

import copy
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from esper.growth import Growth, GrowthWarning
from esper.kasmina import Mirrored, register_blueprint
from esper.kasmina.blueprints import unregister_blueprint
from esper.leyline.errors import BlueprintError, EsperError, HostError
from tests.growth.hf_models import bert, gpt2, tokens
from tests.growth.models import GPT, ResNet, mlp


def planted(net: nn.Module, sample: object, *seeds: tuple[str, str], alpha: float = 1.0) -> Growth:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    growth = Growth(
        net, optimizer, sample=sample, slots=[slot for slot, _ in seeds], controller=None, mode="max"
    )
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


def test_finish_merges_a_linear_seed_after_a_linear_layer_into_the_weight_of_that_layer() -> None:
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
    # The seed is merged, so the optimiser contains the six tensors of the three layers but not the four
    # tensors of the seed.
    assert [len(group["params"]) for group in optimizer.param_groups] == [6]
    assert len(optimizer.state) == 6


def test_finish_does_not_merge_a_linear_seed_into_a_bfloat16_weight() -> None:
    net, x = mlp().bfloat16(), torch.randn(64, 5).bfloat16()
    growth = planted(net, x, ("2", "lora"))
    wanted = net(x)
    assert torch.equal(growth.finish()(x), wanted)
    assert any("grown" in name for name in net.state_dict())


def test_finish_does_not_merge_a_linear_seed_into_a_weight_shared_by_two_layers() -> None:
    net, x = GPT(), torch.randint(11, (4, 6))
    growth = planted(net, x, ("lm_head", "lora"))
    wanted, embedded = net.eval()(x)[0], net.wte.weight.clone()
    growth.finish()
    assert torch.equal(net(x)[0], wanted)
    assert torch.equal(net.wte.weight, embedded)


def test_finish_leaves_containers_attributes_and_hooks_of_the_network_unchanged() -> None:
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


def test_finished_network_has_the_same_output_if_a_seed_has_an_alpha_below_one() -> None:
    net, x = mlp(), torch.randn(4, 5)
    growth = planted(net, x, ("1", "mlp"), alpha=0.25)
    wanted = net(x)
    assert torch.equal(growth.finish()(x), wanted)


def test_finished_network_trains_with_the_same_optimiser_and_can_grow_again() -> None:
    net, x = mlp(), torch.randn(4, 5)
    growth = planted(net, x, ("1", "mlp"))
    optimizer = growth.network.groups.optimisers[0]
    growth.finish()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    net(x).square().sum().backward()
    optimizer.step()
    assert not [name for name, p in net.named_parameters() if torch.equal(p, before[name])]
    again = Growth(net, optimizer, sample=x, mode="max")
    # The new growth finds slots at layers of the network, but not at layers inside the earlier seed.
    assert again.slots == ("0", "2")
    again.finish()
    again = planted(net, x, ("1", "lora"))
    wanted = net(x)
    assert torch.equal(again.finish()(x), wanted)


class Fickle(nn.Module):
    """Network whose output changes when ``finish`` removes its slot."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x)) + float(hasattr(self.first, "esper_slot"))


def test_finish_is_refused_with_the_slot_id_if_it_would_change_the_output() -> None:
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


def test_finish_is_refused_if_it_cannot_trace_a_seed_that_contains_classes_of_esper() -> None:
    register_blueprint("branching", topology="features")(Branching)
    try:
        growth = planted(mlp(), torch.randn(4, 5), ("1", "branching"))
        with pytest.raises(
            BlueprintError, match="the forward of Branching cannot be traced into torch modules"
        ):
            growth.finish()
    finally:
        unregister_blueprint("branching", "features")


def test_finish_does_not_trace_a_seed_without_classes_of_esper() -> None:
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


def test_growth_and_finish_leave_length_and_order_of_a_sequential_network_unchanged() -> None:
    net = nn.Sequential(OrderedDict(a=nn.Linear(5, 8), b=nn.ReLU(), c=nn.Linear(8, 3)))
    growth = planted(net, torch.randn(4, 5), ("b", "mlp"))
    assert (len(net), [name for name, _ in net.named_children()]) == (3, ["a", "b", "c"])
    growth.finish()
    assert (len(net), [name for name, _ in net.named_children()]) == (3, ["a", "b", "c"])


def test_save_pretrained_saves_a_transformers_model_with_a_merged_seed(tmp_path: Path) -> None:
    net, x = bert().eval(), tokens((2,), 3)
    growth = planted(net, x, ("bert.encoder.layer.0.intermediate.dense", "lora"))
    wanted = net(**x).logits
    growth.finish().save_pretrained(tmp_path)
    again = type(net).from_pretrained(tmp_path)
    torch.testing.assert_close(again(**x).logits, wanted, rtol=1e-4, atol=1e-5)


def test_finish_warns_that_save_pretrained_would_omit_the_seeds_of_a_transformers_model() -> None:
    growth = planted(gpt2(), tokens((2, 6), 20), ("transformer.h.0", "mlp"))
    with pytest.warns(
        GrowthWarning, match=r"GPT2LMHeadModel would leave out seeds.*esper\.hf\.from_pretrained\(folder\)$"
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
