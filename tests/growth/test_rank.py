"""Rank of low-rank seeds that is raised in the middle of training, and export of such seeds to PEFT."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from transformers import LlamaConfig, LlamaForCausalLM

import esper
from esper.files.atomic_write import SaveError
from esper.growth import Growth, GrowthWarning
from esper.kasmina.low_rank import branches_of, extensions_beyond, rank_of
from esper.leyline.errors import BlueprintError, EsperError, HostError, SlotError
from tests.growth.models import mlp

X, Y = torch.randn(16, 5, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3


@pytest.fixture(autouse=True)
def _same_weights() -> None:
    torch.manual_seed(0)


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.01)


def momentum(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def started(
    make: Callable[[nn.Module], torch.optim.Optimizer] = adam, **settings: Any
) -> tuple[nn.Module, torch.optim.Optimizer, Growth]:
    """Return a network with a ``lora`` seed of rank 8 behind layer 2 after three steps of training."""
    net = mlp()
    optimizer = make(net)
    known = {"slots": ["0", "2"], "controller": None, "mode": "min"}
    growth = Growth(net, optimizer, sample=X, **(known | settings))
    growth.germinate("2", "lora")
    for _ in range(3):
        step(net, optimizer)
    return net, optimizer, growth


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(X), Y)
    loss.backward()
    optimizer.step()
    return loss


class Nested(nn.Module):
    """Network in which the name of one layer is the ending of the name of another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"head": nn.Linear(5, 5)})
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body["head"](x).relu())


def seed_in(net: nn.Module) -> nn.Module:
    return net.get_submodule("2.esper_slot").graft.seed


def evaluation(net: nn.Module) -> Callable[[], float]:
    return lambda: nn.functional.cross_entropy(net(X), Y).item()


def is_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


# --- raising the rank ---------------------------------------------------------------------------------------


def test_raised_rank_changes_outputs_by_rounding_only_and_the_new_branches_cancel_bit_for_bit() -> None:
    net, _, growth = started()
    before = net(X)
    event = growth.raise_rank("2", 20)
    torch.testing.assert_close(net(X), before, rtol=1e-6, atol=1e-6)
    assert (event.kind, event.slot, event.blueprint) == ("rank", "2", "lora")
    assert str(event) == "epoch 0: lora in 2 was raised from rank 8 to rank 20 (320 parameters)"
    assert rank_of(seed_in(net)) == 20
    h = torch.randn(7, 8)
    one, other = (h @ new.down.T @ new.up.T for new in extensions_beyond(seed_in(net), 8))
    assert one.abs().min() > 0
    assert torch.equal(one, -other)


def test_parameters_remain_the_same_objects_in_the_same_group_with_their_old_values() -> None:
    net, optimizer, growth = started()
    old = {p: p.detach().clone() for p in seed_in(net).parameters()}
    held = list(optimizer.param_groups[0]["params"])
    growth.raise_rank("2", 12)
    assert all(one is other for one, other in zip(optimizer.param_groups[0]["params"], held, strict=True))
    for (parameter, before), now in zip(old.items(), seed_in(net).parameters(), strict=True):
        assert parameter is now
        assert now.numel() == before.numel() * 12 // 8
        assert torch.equal(now[tuple(map(slice, before.shape))], before)
    assert [(b.down.out_features, b.up.in_features) for b in branches_of(seed_in(net))] == [(6, 6), (6, 6)]


def padded(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Return ``tensor`` extended by zeros to ``shape``."""
    result = torch.zeros(shape)
    result[tuple(map(slice, tensor.shape))] = tensor
    return result


def test_next_step_of_adam_equals_a_reference_with_moments_extended_by_zeros() -> None:
    net, optimizer, growth = started()
    moments = {p: copy.deepcopy(optimizer.state[p]) for p in seed_in(net).parameters()}
    growth.raise_rank("2", 12)
    before = {p: p.detach().clone() for p in moments}
    step(net, optimizer)
    for p, kept in moments.items():
        first = 0.9 * padded(kept["exp_avg"], p.shape) + 0.1 * p.grad
        second = 0.999 * padded(kept["exp_avg_sq"], p.shape) + 0.001 * p.grad**2
        # The fourth step: bias corrections are 1 - beta^4.
        first_corrected, second_corrected = first / (1 - 0.9**4), second / (1 - 0.999**4)
        expected = before[p] - 0.01 * first_corrected / (second_corrected.sqrt() + 1e-8)
        torch.testing.assert_close(p.detach(), expected)
        assert float(optimizer.state[p]["step"]) == 4


def test_next_step_of_sgd_equals_a_reference_with_momentum_extended_by_zeros() -> None:
    net, optimizer, growth = started(momentum)
    buffers = {p: optimizer.state[p]["momentum_buffer"].clone() for p in seed_in(net).parameters()}
    growth.raise_rank("2", 12)
    before = {p: p.detach().clone() for p in buffers}
    step(net, optimizer)
    for p, buffer in buffers.items():
        assert buffer.any()
        torch.testing.assert_close(p.detach(), before[p] - 0.1 * (0.9 * padded(buffer, p.shape) + p.grad))


def test_every_new_weight_changes_in_the_next_step() -> None:
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = adam(net)
    growth = Growth(net, optimizer, sample=X, slots="0", controller=None, mode="min")
    growth.germinate("0", "lora")
    step(net, optimizer)
    growth.raise_rank("0", 12)
    seed = growth.network.slots[0].seed
    before = [(new.down.clone(), new.up.clone()) for new in extensions_beyond(seed, 8)]
    step(net, optimizer)
    for (down, up), new in zip(before, extensions_beyond(seed, 8), strict=True):
        assert (new.down != down).all()
        assert (new.up != up).all()


def test_factored_state_of_adafactor_is_extended_along_the_rank_only() -> None:
    net, optimizer, growth = started(lambda net: torch.optim.Adafactor(net.parameters(), lr=0.01))
    growth.raise_rank("2", 12)
    [branch, _] = branches_of(seed_in(net))
    state = optimizer.state[branch.down.weight]
    assert (state["row_var"].shape, state["col_var"].shape) == ((6, 1), (1, 8))
    step(net, optimizer)
    assert all(p.isfinite().all() for p in net.parameters())


def test_rank_can_be_raised_while_a_loss_is_alive_and_gradients_are_accumulated() -> None:
    net, optimizer, growth = started()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(X[:8]), Y[:8])
    loss.backward()
    gradients = {p: p.grad.clone() for p in seed_in(net).parameters()}
    growth.raise_rank("2", 12)
    for p, gradient in gradients.items():
        assert torch.equal(p.grad, padded(gradient, p.shape))
    nn.functional.cross_entropy(net(X[8:]), Y[8:]).backward()
    assert all(not torch.equal(p.grad, padded(gradient, p.shape)) for p, gradient in gradients.items())
    assert loss.isfinite()


def test_slot_table_flops_and_summary_count_the_additional_weights() -> None:
    _, _, growth = started()
    before = growth.flops
    growth.raise_rank("2", 16)
    assert growth.network.table.seed_params[0].tolist()[1] == 2 * 8 * 16
    assert "256" in growth.summary()
    assert growth.flops > before


def test_permanent_seed_and_incubating_seed_can_be_raised() -> None:
    net, _, growth = started()
    growth.fossilize("2")
    growth.raise_rank("2", 10)
    assert rank_of(seed_in(net)) == 10
    net, _, growth = started(incubation_epochs=2)
    before = net(X)
    growth.raise_rank("2", 10)
    assert torch.equal(net(X), before)


def test_prune_removes_a_raised_seed_and_its_optimiser_state() -> None:
    net, optimizer, growth = started()
    growth.raise_rank("2", 16)
    growth.prune("2")
    assert set(optimizer.state) == set(net.parameters())
    growth.germinate("2", "lora")
    assert rank_of(seed_in(net)) == 8


def test_compiled_network_runs_the_raised_seed_and_reaches_no_recompile_limit() -> None:
    net = Nested()
    compiled = torch.compile(net, backend="eager", dynamic=False)
    optimizer = adam(net)
    growth = Growth(compiled, optimizer, sample=X, slots="head", controller=None, mode="min")
    growth.germinate("head", "lora")
    with torch._dynamo.config.patch(recompile_limit=2):
        for rank in (10, 12, 14, 16, 18):
            step(compiled, optimizer)
            growth.raise_rank("head", rank)
        step(compiled, optimizer)
        torch.testing.assert_close(compiled(X), net(X))
        assert [event.kind for event in growth.end_epoch(evaluation(net))] == ["measured"]


def test_seed_that_was_raised_is_not_reported_as_trained() -> None:
    net, optimizer, growth = started()
    growth.end_epoch(evaluation(net))
    growth.raise_rank("2", 16)
    with pytest.warns(GrowthWarning, match="lora in 2 did not change"):
        growth.end_epoch(evaluation(net))
    step(net, optimizer)
    assert [event.kind for event in growth.end_epoch(evaluation(net))] == ["measured"]


# --- states, copies and files -------------------------------------------------------------------------------


def test_states_of_growth_network_and_optimiser_resume_bit_for_bit() -> None:
    net, optimizer, growth = started()
    growth.raise_rank("2", 16)
    step(net, optimizer)
    kept = copy.deepcopy((growth.state_dict(), net.state_dict(), optimizer.state_dict()))
    torch.manual_seed(1)
    other = mlp()
    second = adam(other)
    again = Growth(other, second, sample=X, slots=["0", "2"], controller=None, mode="min")
    again.load_state_dict(json.loads(json.dumps(kept[0])))
    other.load_state_dict(kept[1])
    second.load_state_dict(kept[2])
    assert again.raise_rank("2", 18).sentence.startswith("lora in 2 was raised from rank 16")
    again.load_state_dict(kept[0])
    assert rank_of(seed_in(other)) == 16
    other.load_state_dict(kept[1])
    second.load_state_dict(kept[2])
    assert step(net, optimizer) == step(other, second)
    assert is_equal(net.state_dict(), other.state_dict())


def test_state_of_a_growth_without_ranks_builds_the_rank_of_the_blueprint() -> None:
    net, _, growth = started()
    state = growth.state_dict()
    del state["ranks"]  # As saved by earlier versions.
    growth.raise_rank("2", 16)
    growth.load_state_dict(state)
    assert rank_of(seed_in(net)) == 8


def test_state_of_a_network_with_a_raised_seed_is_refused_by_a_fresh_growth_without_its_state() -> None:
    net, _, growth = started()
    growth.raise_rank("2", 16)
    other = mlp()
    second = adam(other)
    again = Growth(other, second, sample=X, slots=["0", "2"], controller=None, mode="min")
    with pytest.raises(
        HostError, match=r"has lora \(linear_add, rank 16\) in 2, and this network has no seed"
    ):
        other.load_state_dict(net.state_dict())
    again.load_state_dict(growth.state_dict())
    other.load_state_dict(net.state_dict())
    assert torch.equal(other(X), net(X))
    assert {id(p) for p in second.param_groups[0]["params"]} == {id(p) for p in other.parameters()}


def test_state_of_an_environments_network_holds_the_raised_rank() -> None:
    net, _, growth = started()
    low = growth.network.state()
    growth.raise_rank("2", 16)
    high = growth.network.state()
    wanted = net(X)
    growth.network.load_state(low)
    assert rank_of(seed_in(net)) == 8
    growth.network.load_state(high)
    assert rank_of(seed_in(net)) == 16
    assert torch.equal(net(X), wanted)


@pytest.mark.parametrize("merge", [True, False])
def test_saved_and_finished_networks_equal_the_raised_network(merge: bool, tmp_path: Path) -> None:
    net, optimizer, growth = started()
    growth.raise_rank("2", 16)
    step(net, optimizer)
    wanted = net(X)
    growth.save(tmp_path / "net.pt")
    loaded = esper.load(tmp_path / "net.pt", base=mlp())
    assert torch.equal(loaded(X), wanted)
    torch.testing.assert_close(growth.finish(merge=merge)(X), wanted)
    assert any("grown" in name for name in net.state_dict()) is not merge
    step(net, optimizer)


def test_followed_average_gets_the_new_weights_and_keeps_its_old_ones() -> None:
    net = mlp()
    average = AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    optimizer = adam(net)
    growth = Growth(net, optimizer, sample=X, slots=["0", "2"], controller=None, mode="min", follow=[average])
    growth.germinate("2", "lora")
    average.update_parameters(net)
    step(net, optimizer)
    average.update_parameters(net)
    before, old = average(X), [p.detach().clone() for p in seed_in(average.module).parameters()]
    growth.raise_rank("2", 16)
    torch.testing.assert_close(average(X), before, rtol=1e-6, atol=1e-6)
    seeds = seed_in(average.module), seed_in(net)
    for kept, now in zip(old, seeds[0].parameters(), strict=True):
        assert torch.equal(now[tuple(map(slice, kept.shape))], kept)
    for theirs, ours in zip(*(extensions_beyond(seed, 8) for seed in seeds), strict=True):
        assert torch.equal(theirs.down, ours.down)
        assert torch.equal(theirs.up, ours.up)
    step(net, optimizer)
    average.update_parameters(net)
    assert not torch.equal(seeds[0].one[0].weight, seeds[1].one[0].weight)
    assert average.module.state_dict().keys() == net.state_dict().keys()
    growth.finish()
    assert average(X).isfinite().all()


def diverged(net: nn.Module, growth: Growth) -> list[str]:
    """Set the weights of a layer to NaN, and return the kinds of the events of the next epoch."""
    nn.init.constant_(net.get_submodule("4").weight, math.nan)
    return [event.kind for event in growth.end_epoch(evaluation(net))]


def test_rollback_returns_to_the_rank_and_moments_of_the_last_good_epoch() -> None:
    net, optimizer, growth = started(rollback=True)
    for _ in range(3):  # A snapshot is taken after epoch 3.
        step(net, optimizer)
        growth.end_epoch(evaluation(net))
    names = dict(net.named_parameters())
    moments = {name: optimizer.state[p]["exp_avg"].clone() for name, p in names.items()}
    low = copy.deepcopy(net.state_dict())
    growth.raise_rank("2", 16)
    step(net, optimizer)
    assert "rolled_back" in diverged(net, growth)
    assert rank_of(seed_in(net)) == 8
    assert is_equal(net.state_dict(), low)
    assert all(torch.equal(optimizer.state[p]["exp_avg"], moments[n]) for n, p in net.named_parameters())
    growth.raise_rank("2", 16)
    for _ in range(2):  # The rollback was in epoch 4; a snapshot is taken after epoch 6.
        step(net, optimizer)
        growth.end_epoch(evaluation(net))
    high = copy.deepcopy(net.state_dict())
    step(net, optimizer)
    assert "rolled_back" in diverged(net, growth)
    assert rank_of(seed_in(net)) == 16
    assert is_equal(net.state_dict(), high)
    step(net, optimizer)


# --- refusals -----------------------------------------------------------------------------------------------


class WithVector(torch.optim.SGD):
    """Optimiser with a state tensor that has one number per row of a parameter."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p]["rows"] = torch.ones(len(p))


REFUSED: dict[str, tuple[str, Any, type[Exception], str]] = {
    "empty slot": ("0", 16, SlotError, "slot 0 holds no seed; germinate('0', 'lora') plants one"),
    "unknown slot": ("7", 16, SlotError, "slot"),
    "same rank": (
        "2",
        8,
        EsperError,
        "rank is 8; lora in 2 has rank 8, and can be raised to any larger even number",
    ),
    "lower rank": ("2", 4, EsperError, "rank is 4; lora in 2 has rank 8"),
    "odd rank": ("2", 17, EsperError, "rank is 17; lora in 2 has rank 8"),
    "fraction": ("2", 16.0, EsperError, "rank is 16.0; lora in 2 has rank 8"),
    "text": ("2", "16", EsperError, "rank is '16'; lora in 2 has rank 8"),
    "truth value": ("2", True, EsperError, "rank is True; lora in 2 has rank 8"),
    "not a number": ("2", math.nan, EsperError, "rank is nan; lora in 2 has rank 8"),
    "too large": (
        "2",
        16,
        BlueprintError,
        "rank 16 needs 128 more parameters, and of max_params=200 only 72 are left; choose a lower rank",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_raise_rank_refuses_bad_arguments_and_changes_nothing(case: str) -> None:
    slot, rank, kind, sentence = REFUSED[case]
    net, optimizer, growth = started(max_params=200)
    before = copy.deepcopy((net.state_dict(), optimizer.state_dict(), repr(growth.state_dict())))
    with pytest.raises(kind) as caught:
        growth.raise_rank(slot, rank)
    assert str(caught.value).startswith(sentence)
    assert is_equal(net.state_dict(), before[0])
    assert str(optimizer.state_dict()) == str(before[1])
    assert repr(growth.state_dict()) == before[2]


def test_raise_rank_refuses_seeds_without_a_rank_and_finished_networks() -> None:
    _, _, growth = started()
    growth.germinate("0", "mlp")
    with pytest.raises(SlotError, match="mlp in 0 has no rank; only a low-rank seed"):
        growth.raise_rank("0", 16)
    growth.finish()
    with pytest.raises(EsperError, match=r"raise_rank\(\) came after finish\(\)"):
        growth.raise_rank("2", 16)


def test_raise_rank_with_an_unknown_optimiser_state_is_refused_and_undone() -> None:
    net, optimizer, growth = started(lambda net: WithVector(net.parameters(), lr=0.1, momentum=0.9))
    average = copy.deepcopy(net)
    growth.follow(average)
    before = copy.deepcopy((net.state_dict(), optimizer.state_dict(), repr(growth.state_dict())))
    with pytest.raises(HostError, match="WithVector keeps 'rows' of shape \\(4,\\) for a parameter of shape"):
        growth.raise_rank("2", 16)
    for each in (net, average):
        assert is_equal(each.state_dict(), before[0])
        assert rank_of(seed_in(each)) == 8
        assert seed_in(each).one[0].out_features == 4
    assert str(optimizer.state_dict()) == str(before[1])
    assert repr(growth.state_dict()) == before[2]
    step(net, optimizer)


def test_raise_rank_refuses_a_seed_whose_buffers_ddp_has_allocated() -> None:
    net, _, growth = started()
    growth._processes.is_active = True  # As if DistributedDataParallel had wrapped the network with its seed.
    before = net(X)
    with pytest.raises(HostError, match="the seed in slot 2 is older than its DistributedDataParallel"):
        growth.raise_rank("2", 16)
    assert torch.equal(net(X), before)
    assert rank_of(seed_in(net)) == 8


# --- adapters -----------------------------------------------------------------------------------------------

TOKENS = torch.randint(20, (2, 6), generator=torch.Generator().manual_seed(0))
QUERY, GATE = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.gate_proj"


def llama(**known: Any) -> LlamaForCausalLM:
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=20, num_hidden_layers=2, **sizes, **known)).eval()


def adapted(net: nn.Module, sample: Any, *slots: str, **settings: Any) -> tuple[Growth, Any]:
    """Return a ``Growth`` that trains only seeds, with a ``lora`` in each slot, and its optimiser."""
    optimizer = torch.optim.AdamW([{"params": []}], lr=0.05)
    growth = Growth(
        net.requires_grad_(False), optimizer, sample=sample, slots=slots, controller=None, mode="min"
    )
    for slot in slots:
        growth.germinate(slot, "lora", **settings)
    return growth, optimizer


def train_language(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        net(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()


def loaded_by_peft(base: nn.Module, folder: Path) -> nn.Module:
    from peft import PeftModel

    return PeftModel.from_pretrained(base, folder).eval()


peft_warns = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


@peft_warns
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_peft_loads_an_adapter_of_two_ranks_with_the_logits_of_the_grown_model(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    net = llama().to(dtype)
    base = copy.deepcopy(net)
    growth, optimizer = adapted(net, TOKENS, QUERY, GATE)
    train_language(net, optimizer)
    growth.raise_rank(GATE, 20)
    train_language(net, optimizer)
    growth.set_alpha(QUERY, 0.5)
    growth.save_adapter(tmp_path / "new" / "adapter")
    wanted, plain = net(TOKENS).logits, base(TOKENS).logits
    assert (wanted - plain).abs().max() > 1e-3
    model = loaded_by_peft(base, tmp_path / "new" / "adapter")
    torch.testing.assert_close(model(TOKENS).logits, wanted)
    assert type(model).__name__ == "PeftModelForCausalLM"
    torch.testing.assert_close(model.merge_and_unload()(TOKENS).logits, wanted)
    config = json.loads((tmp_path / "new" / "adapter" / "adapter_config.json").read_text())
    pattern = {r"^model\.layers\.1\.mlp\.gate_proj": 20}
    assert (config["r"], config["lora_alpha"]) == (8, 8)
    assert (config["rank_pattern"], config["alpha_pattern"]) == (pattern, pattern)
    assert config["lora_bias"] is False


@peft_warns
def test_adapter_of_layers_with_bias_stores_the_effect_on_the_bias(tmp_path: Path) -> None:
    net = llama(attention_bias=True, mlp_bias=True)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    base = copy.deepcopy(net)
    growth, optimizer = adapted(net, TOKENS, QUERY, GATE)
    train_language(net, optimizer)
    growth.save_adapter(tmp_path / "adapter")
    wanted = net(TOKENS).logits
    model = loaded_by_peft(base, tmp_path / "adapter")
    torch.testing.assert_close(model(TOKENS).logits, wanted)
    torch.testing.assert_close(model.merge_and_unload()(TOKENS).logits, wanted)


@peft_warns
@pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed but the targeted layer")
def test_adapter_of_layers_with_and_without_bias_gives_equal_logits(tmp_path: Path) -> None:
    net = llama(attention_bias=True)
    nn.init.normal_(net.get_submodule(QUERY).bias)
    base = copy.deepcopy(net)
    growth, optimizer = adapted(net, TOKENS, QUERY, GATE)
    train_language(net, optimizer)
    growth.save_adapter(tmp_path / "adapter")
    model = loaded_by_peft(base, tmp_path / "adapter")
    torch.testing.assert_close(model(TOKENS).logits, net(TOKENS).logits)


def test_adapter_changes_only_the_layer_of_the_seed(tmp_path: Path) -> None:
    net = Nested()
    base = copy.deepcopy(net)
    growth, optimizer = adapted(net, X, "head")
    for _ in range(3):
        nn.functional.cross_entropy(net(X), Y).backward()
        optimizer.step()
    growth.save_adapter(tmp_path / "adapter")
    model = loaded_by_peft(base, tmp_path / "adapter")
    torch.testing.assert_close(model(X), net(X))
    assert model.targeted_module_names == ["head"]


def test_adapter_of_a_model_in_bfloat16_is_stored_in_float32(tmp_path: Path) -> None:
    net = Nested().to(torch.bfloat16)
    growth, _ = adapted(net, X.to(torch.bfloat16), "head", "body.head")
    growth.save_adapter(tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    names = {
        f"{path}.lora_{part}" for path in ("head", "body.head") for part in ("A.weight", "B.weight", "B.bias")
    }
    assert tensors.keys() == {f"base_model.model.{name}" for name in names}


def test_seeds_that_are_no_adapters_are_named_in_one_refusal(tmp_path: Path) -> None:
    net = mlp()
    growth = Growth(net, adam(net), sample=X, slots=["0", "1", "2"], controller=None, mode="min")
    with pytest.raises(HostError, match="no seed takes part in the forward pass, so there is no adapter"):
        growth.save_adapter(tmp_path / "adapter")
    growth.germinate("0", "mlp")
    growth.germinate("1", "lora")
    growth.germinate("2", "lora", style="gated_gate")
    with pytest.raises(HostError) as caught:
        growth.save_adapter(tmp_path / "adapter")
    assert str(caught.value) == (
        "an adapter holds only low-rank seeds (lora) that are added to a torch.nn.Linear: mlp in 0 has no"
        " rank, lora in 1 is on a ReLU, lora in 2 is blended by gate; prune() these seeds, or store"
        " everything with save(path)"
    )
    assert not (tmp_path / "adapter").exists()


def test_adapter_of_a_network_whose_own_layers_train_too_causes_a_warning(tmp_path: Path) -> None:
    _, _, growth = started()
    with pytest.warns(GrowthWarning, match="the optimiser also trains 6 parameters of the network itself"):
        growth.save_adapter(tmp_path / "adapter")


def test_adapter_replaces_an_older_adapter_but_no_other_files(tmp_path: Path) -> None:
    net = Nested()
    growth, _ = adapted(net, X, "head")
    folder = tmp_path / "adapter"
    folder.mkdir()
    growth.save_adapter(folder)
    growth.raise_rank("head", 12)
    growth.save_adapter(folder)
    weights = load_file(folder / "adapter_model.safetensors")
    assert weights["base_model.model.head.lora_A.weight"].shape == (12, 5)
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 12
    (folder / "notes.md").write_text("mine")
    with pytest.raises(SaveError, match=r"also holds notes\.md and is not replaced; choose another folder"):
        growth.save_adapter(folder)
    growth.prune("head")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter"]
    assert len(list(folder.iterdir())) == 3


def test_adapter_that_cannot_be_written_leaves_the_older_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    growth, _ = adapted(Nested(), X, "head")
    folder = tmp_path / "adapter"
    growth.save_adapter(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    growth.raise_rank("head", 12)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("esper.files.atomic_write.name_folder", fail)
    with pytest.raises(SaveError, match="cannot be written: No space left on device"):
        growth.save_adapter(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert list(tmp_path.iterdir()) == [folder]
