"""``esper.expand``: equal outputs at birth, what trains, the old model in a context, and plain models at the
end."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AlbertConfig, AlbertModel, PreTrainedModel

import esper
from esper.growth.expanded import EXPANDED, Expanded
from esper.leyline.errors import EsperError
from tests.growth.hf_families import FAMILIES, Family
from tests.growth.interrupts import interrupted

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error::esper.leyline.errors.GrowthWarning"),
]
BLOCKS = {"blocks": 2}
WIDER = {"widen": 32}
RANK = {"rank": 4}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", BLOCKS),
    ("gemma3", BLOCKS),
    ("olmo2", BLOCKS),
    ("gpt2", BLOCKS),
    ("t5_decoder", BLOCKS | {"where": ["decoder.block.1", "decoder.block.2"]}),
    ("vit", BLOCKS),
    ("mixtral", {"blocks": 1}),
    ("llama", WIDER),
    ("gemma3", WIDER),
    ("vit", WIDER),
    ("llama", RANK),
    ("bert", RANK),
]
IDS = [f"{name} {next(iter(settings))}" for name, settings in CASES]


class Block(nn.Module):
    """Residual block with a mask as keyword argument, without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(torch.relu(self.up(self.norm(h))))


class Net(nn.Module):
    """Three blocks with a batch normalisation in front."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 8), nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


X = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
Y = X[:, :3].argmax(1)
BATCHES = [(x, y) for x, y in zip(X.split(16), Y.split(16), strict=True)]
SAMPLE = X[:4]


@torch.no_grad()
def output(model: nn.Module, sample: Any) -> Tensor:
    mode = model.training
    model.eval()
    found = model(**sample).logits if isinstance(sample, dict) else model(sample)
    model.train(mode)
    return found


def train(model: nn.Module, optimizer: torch.optim.Optimizer, sample: Any, steps: int = 3) -> None:
    model.train()
    for _ in range(steps):
        loss = model(**sample).loss if isinstance(sample, dict) else F.cross_entropy(model(X), Y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()


def optimizer_of(expanded: Expanded) -> torch.optim.Optimizer:
    return torch.optim.AdamW(expanded.parameters(), lr=1e-2)


def state(model: nn.Module) -> dict[str, Any]:
    """Return everything that a refused expansion must not change."""
    config = getattr(model, "config", None)
    hooks = {
        path: (len(m._forward_hooks), len(m._forward_pre_hooks), m.training)
        for path, m in model.named_modules()
    }
    return {
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "identities": {name: id(p) for name, p in model.named_parameters()},
        "flags": {name: p.requires_grad for name, p in model.named_parameters()},
        "config": None if config is None else config.to_dict(),
        "hooks": hooks,
        "load hooks": len(model._load_state_dict_pre_hooks),
        "expanded": model in EXPANDED,
    }


def assert_equal_states(one: dict[str, Any], other: dict[str, Any]) -> None:
    weights, theirs = one.pop("weights"), other.pop("weights")
    assert one == other
    assert all(torch.equal(weights[name], theirs[name]) for name in weights)


# --- families of transformers -------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "settings"), CASES, ids=IDS)
def test_expanded_model_trains_only_new_parameters_and_switches_back_to_the_old_model(
    name, settings, tmp_path
):
    family: Family = FAMILIES[name]
    model, sample = family.build(), family.sample()
    before, config = output(model, sample), model.config.to_dict()
    old = dict(model.state_dict())

    expanded = esper.expand(model, sample=sample, **settings)
    assert expanded.model is model
    assert torch.equal(output(model, sample), before)
    assert expanded.trainable == expanded.new
    assert {n for n, p in model.named_parameters() if p.requires_grad} == set(expanded.trainable)

    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = optimizer_of(expanded)
    train(model, optimizer, sample)
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, start[n])}
    assert moved == set(expanded.trainable)

    trained = output(model, sample)
    assert not torch.equal(trained, before)
    with expanded.original() as same:
        assert same is model
        assert torch.equal(output(model, sample), before)
        if "blocks" in settings:
            assert model.config.to_dict() == config
            assert model.state_dict().keys() == old.keys()
    assert torch.equal(output(model, sample), trained)

    finished = expanded.finish()
    assert finished is model
    assert all(p.requires_grad for p in model.parameters())
    exact = {"rtol": 0.0, "atol": 0.0} if "blocks" in settings else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(output(model, sample), trained, **exact)
    assert not any(type(module).__module__.startswith("esper") for module in model.modules())
    model.save_pretrained(tmp_path)
    read = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(output(read, sample), output(model, sample))


@pytest.mark.parametrize("settings", [BLOCKS, WIDER, RANK], ids=str)
def test_generation_with_a_cache_equals_that_of_the_old_model_inside_the_context(settings):
    family = FAMILIES["llama"]
    model, prompt = family.build(), {"input_ids": family.sample()["input_ids"][:, :3]}
    known = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    old = model.generate(**prompt, **known).tolist()
    expanded = esper.expand(model, sample=prompt, **settings)
    train(model, torch.optim.SGD(expanded.parameters(), lr=5.0), family.sample())
    new = model.generate(**prompt, **known).tolist()

    assert new != old
    assert new == model.generate(**prompt, **known, use_cache=False).tolist()
    with expanded.original():
        assert model.generate(**prompt, **known).tolist() == old
    assert model.generate(**prompt, **known).tolist() == new


def test_optimizer_continues_after_finish_with_new_blocks_only():
    model, sample = FAMILIES["llama"].build(), FAMILIES["llama"].sample()
    expanded = esper.expand(model, sample=sample, blocks=1)
    optimizer = optimizer_of(expanded)
    train(model, optimizer, sample)
    expanded.finish()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, optimizer, sample)

    assert {n for n, p in model.named_parameters() if not torch.equal(p, start[n])} == set(expanded.new)


def test_optimizer_passed_to_finish_holds_the_widened_layers_with_their_moments():
    model, sample = FAMILIES["llama"].build(), FAMILIES["llama"].sample()
    expanded = esper.expand(model, sample=sample, **WIDER, train="all")
    optimizer = optimizer_of(expanded)
    train(model, optimizer, sample)
    expanded.finish(optimizer)

    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
    weight = model.model.layers[0].mlp.up_proj.weight
    assert optimizer.state[weight]["exp_avg"].shape == weight.shape == (64, 16)


def test_hidden_states_that_the_sample_asks_for_do_not_hinder_two_new_blocks():
    family = FAMILIES["llama"]
    model, sample = family.build(), family.sample() | {"output_hidden_states": True}
    esper.expand(model, sample=sample, blocks=2)

    assert len(model(**sample).hidden_states) == 6


# --- networks of torch --------------------------------------------------------------------------------------


def test_old_weights_and_statistics_are_back_inside_the_context_when_everything_trained():
    model = net()
    model.first.weight.requires_grad_(False)
    before, weights = output(model, SAMPLE), copy.deepcopy(model.state_dict())
    expanded = esper.expand(model, sample=SAMPLE, blocks=2, train="all")
    assert set(expanded.trainable) == {n for n, _ in model.named_parameters()} - {"first.weight"}
    train(model, optimizer_of(expanded), SAMPLE)
    trained = output(model, SAMPLE)

    with expanded.original(), expanded.original():
        assert torch.equal(output(model, SAMPLE), before)
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert torch.equal(output(model, SAMPLE), trained)
    expanded.finish()
    assert not model.first.weight.requires_grad
    assert model.head.weight.requires_grad


def test_statistics_that_moved_in_training_are_those_of_birth_inside_the_context():
    model = net()
    expanded = esper.expand(model, sample=SAMPLE, blocks=1)
    birth = model.norm.running_mean.clone()
    train(model, optimizer_of(expanded), SAMPLE)
    moved = model.norm.running_mean.clone()

    assert not torch.equal(moved, birth)
    with expanded.original():
        assert torch.equal(model.norm.running_mean, birth)
    assert torch.equal(model.norm.running_mean, moved)


def test_context_is_left_completely_after_an_error_in_it_and_new_blocks_follow_the_training_mode():
    model = net()
    expanded = esper.expand(model, sample=SAMPLE, blocks=2)
    model.train()

    def fail() -> None:
        with expanded.original():
            model.eval()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert len(model.blocks) == 5
    assert not any(module.training for module in model.modules())
    with expanded.original():
        pass
    assert len(model.blocks) == 5


def test_original_refuses_if_a_frozen_parameter_was_changed():
    model = net()
    expanded = esper.expand(model, sample=SAMPLE, blocks=1)
    with torch.no_grad():
        model.head.bias[0] += 1e-6
    with pytest.raises(EsperError, match=r"^1 old parameters have changed .* the first is head\.bias"):
        expanded.original().__enter__()
    assert len(model.blocks) == 4


@pytest.mark.parametrize("settings", [{"blocks": 2}, {"widen": 4}, {"rank": 4}], ids=str)
def test_compiled_model_follows_the_switch_to_the_old_model_and_back(settings):
    model = net()
    before = output(model, SAMPLE)
    expanded = esper.expand(model, sample=SAMPLE, **settings)
    compiled = torch.compile(model, backend="eager")
    compiled(SAMPLE)
    train(model, optimizer_of(expanded), SAMPLE)
    trained = output(model, SAMPLE)

    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(compiled(SAMPLE), trained)
            with expanded.original():
                assert torch.equal(compiled(SAMPLE), before)


def test_top_blocks_of_the_largest_list_are_copied_by_default():
    expanded = esper.expand(net(), sample=SAMPLE, blocks=2)

    assert expanded.places == ("blocks.1", "blocks.2")
    assert {name.rpartition(".")[0].rpartition(".")[0] for name in expanded.new} == {"blocks.2", "blocks.4"}
    assert "blocks=2 at blocks.1 … blocks.2; 456 of 1,231" in repr(expanded)


def test_named_block_is_copied_and_all_blocks_are_widened_by_default():
    assert esper.expand(net(), sample=SAMPLE, blocks=1, where="blocks.0").places == ("blocks.0",)
    wide = esper.expand(net(), sample=SAMPLE, widen=5)
    assert wide.places == ("blocks.0", "blocks.1", "blocks.2")
    assert wide.finish().blocks[1].up.weight.shape == (17, 8)


def test_diagnosis_chooses_the_places_and_states_its_cost_first():
    lines: list[str] = []
    model = net()
    expanded = esper.expand(
        model,
        sample=SAMPLE,
        blocks=2,
        where="diagnose",
        train_loader=BATCHES,
        val_loader=BATCHES,
        loss=F.cross_entropy,
        steps=400,
        cost="flops",
        show=lines.append,
    )

    assert "3 candidates (stack), compute of at most 400 training steps" in lines[0]
    assert expanded.diagnosis is not None
    assert set(expanded.places) == {row.place for row in expanded.diagnosis.rows[:2]}
    assert all(row.steps for row in expanded.diagnosis.rows[:2])
    before = state(model)
    known = {"train_loader": BATCHES, "val_loader": BATCHES, "loss": F.cross_entropy, "cost": "flops"}
    with pytest.raises(EsperError, match=r"^the race compared 0 places, 1 are needed; allow more steps="):
        esper.expand(expanded.finish(), sample=SAMPLE, blocks=1, where="diagnose", steps=1, show=len, **known)
    assert before["weights"].keys() == state(model)["weights"].keys()


# --- measurements -------------------------------------------------------------------------------------------


def test_report_has_the_paired_differences_between_the_expanded_and_the_old_model():
    model = net()
    expanded = esper.expand(model, sample=SAMPLE, blocks=1)
    train(model, optimizer_of(expanded), SAMPLE, steps=20)
    table = expanded.report(new=BATCHES, old=BATCHES[:2], loss=F.cross_entropy)
    [report] = table.arms

    def losses(batches):
        return torch.tensor([F.cross_entropy(output(model, x), y) for x, y in batches], dtype=torch.float64)

    after = losses(BATCHES)
    with expanded.original():
        before = losses(BATCHES)
    assert report.new.before == pytest.approx(before.mean().item())
    assert report.new.after == pytest.approx(after.mean().item())
    gain = after - before
    assert report.new.difference == pytest.approx((gain.mean().item(), gain.std().item() / 2))
    assert report.new.difference.mean < 0
    assert str(table).splitlines()[1].split()[:3] == ["expanded", "–", "228"]


@pytest.mark.parametrize("settings", [{"blocks": 2}, {"widen": 8}, {"rank": 4}], ids=str)
def test_comparison_trains_every_arm_from_the_old_model_and_changes_nothing(settings):
    def without_statistics() -> Net:
        model = net()
        model.norm = nn.Identity()
        return model

    model = without_statistics()
    expanded = esper.expand(model, sample=SAMPLE, **settings)
    train(model, optimizer_of(expanded), SAMPLE)
    before, position = state(model), torch.get_rng_state()
    rates = {"existing": [1e-2], "lora": [1e-2], "expanded": [1e-2], "full": [1e-2, 1e-9]}
    table = expanded.compare(BATCHES, new=BATCHES, old=BATCHES, loss=F.cross_entropy, steps=12, rates=rates)

    assert_equal_states(state(model), before)
    assert torch.equal(torch.get_rng_state(), position)
    arms = {(arm.name, arm.rate): arm for arm in table.arms}
    untouched = without_statistics()
    assert {arm.trained for arm in table.arms if arm.name == "full"} == {
        sum(p.numel() for p in untouched.parameters())
    }
    new = sum(p.numel() for p in expanded.parameters())
    assert arms["expanded", 1e-2].trained == new
    if "blocks" in settings:
        assert arms["existing", 1e-2].trained == new
    assert abs(arms["lora", 1e-2].trained - new) <= 3 * 2 * (12 + 8) / 2
    base = sum(F.cross_entropy(output(untouched, x), y).item() for x, y in BATCHES) / len(BATCHES)
    assert all(arm.new.before == pytest.approx(base) for arm in table.arms)
    assert arms["full", 1e-9].new.after == pytest.approx(base, abs=1e-4)
    assert all(arm.new.difference.mean < 0 for arm in table.arms if arm.rate == 1e-2)
    assert len(str(table).splitlines()) == 1 + len(table.arms)


def test_comparison_refuses_unknown_arms_and_arms_without_layers_before_training():
    expanded = esper.expand(net(), sample=SAMPLE, blocks=1)
    known = {"new": BATCHES, "old": BATCHES, "loss": F.cross_entropy, "steps": 2}
    with pytest.raises(EsperError, match=r"unknown arm 'half'.*expanded, existing, lora, full"):
        expanded.compare(BATCHES, **known, rates={"half": [1e-3]})
    with pytest.raises(EsperError, match=r"^steps is 0"):
        expanded.compare(BATCHES, **known | {"steps": 0})
    gpt2, batches = FAMILIES["gpt2"], [FAMILIES["gpt2"].sample()]
    expanded = esper.expand(gpt2.build(), sample=batches[0], blocks=1)
    known = {"new": batches, "old": batches, "loss": lambda model, batch: model(**batch).loss, "steps": 2}
    with pytest.raises(EsperError, match=r"^no torch\.nn\.Linear runs once"):
        expanded.compare(batches, **known, rates={"full": [1e-3], "lora": [1e-3]})


# --- refusals -----------------------------------------------------------------------------------------------


class Shared(Net):
    """Network whose blocks share a layer."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up = self.blocks[0].up


class Numbered(Net):
    """Network that selects its blocks by number."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        return self.head(self.blocks[2](self.blocks[1](self.blocks[0](h))))


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 12)
        self.other.weight = self.blocks[1].up.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0 * self.other(self.first(x)).sum()


def quantised() -> Net:
    model = net()
    for block in model.blocks:
        block.up.weight = nn.Parameter(torch.zeros(12, 8, dtype=torch.int8), requires_grad=False)
        block.up.forward = lambda h, up=block.up: F.linear(h, up.weight.float())
    return model


class Plain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


REFUSALS: list[tuple[Callable[[], nn.Module], dict[str, Any], str]] = [
    (net, {}, r"pass one of blocks=, widen= and rank=; found none"),
    (net, {"blocks": 1, "rank": 4}, r"found blocks=1 and rank=4"),
    (net, {"blocks": 0}, r"blocks is 0; it must be a whole number, 1 or more"),
    (net, {"blocks": True}, r"blocks is True"),
    (net, {"widen": 2.5}, r"widen is 2\.5"),
    (net, {"rank": 3}, r"rank is 3; it must be an even number"),
    (net, {"blocks": 4}, r"blocks is 4, and each of the 3 blocks of 'blocks'"),
    (net, {"blocks": 1, "train": "some"}, r"train is 'some'"),
    (net, {"blocks": 1, "where": "nothing"}, r"unknown submodule .*'nothing'"),
    (net, {"blocks": 1, "where": []}, r"no slot was named"),
    (net, {"blocks": 1, "where": "blocks.*"}, r"blocks is 1, and where names 3 submodules"),
    (net, {"blocks": 1, "where": "head"}, r"'head' is not an element of a ModuleList"),
    (net, {"rank": 4, "where": "blocks.0"}, r"where names 'blocks\.0', a Block; rank adds"),
    (net, {"widen": 4, "where": "head"}, r"has no pair"),
    (FAMILIES["llama"].build, {"widen": 6}, r"change with the new parameters .* a multiple of 32"),
    (
        net,
        {"blocks": 1, "where": "diagnose"},
        r"no further arguments; .* pass train_loader, val_loader and loss",
    ),
    (net, {"blocks": 1, "loss": F.cross_entropy}, r"where is 'top' with loss;"),
    (Plain, {"blocks": 1}, r"Plain has no list of blocks; name"),
    (Shared, {"blocks": 1}, r"shares the parameter .* with another module"),
    (Numbered, {"blocks": 1}, r"selects its blocks by number, or counts them elsewhere"),
    (Tied, {"widen": 4, "where": "blocks.1"}, r"weight of 'blocks\.1\.up' is shared with another module"),
    (quantised, {"blocks": 1}, r"'blocks\.2', a Block, has quantised weights"),
    (quantised, {"widen": 4}, r"quantised"),
    (lambda: nn.DataParallel(net()), {"blocks": 1}, r"DataParallel"),
    (lambda: torch.compile(net()), {"blocks": 1}, r"pass the Net in it, wrap it afterwards"),
]


@pytest.mark.parametrize(("build", "settings", "sentence"), REFUSALS)
def test_bad_input_is_refused_by_one_sentence_and_changes_nothing(build, settings, sentence):
    model = build().eval()
    for parameter in list(model.parameters())[:1]:
        parameter.requires_grad_(False)
    sample = FAMILIES["llama"].sample() if hasattr(model, "config") else SAMPLE
    before, position = state(model), torch.get_rng_state()
    with pytest.raises(EsperError, match=sentence) as caught:
        esper.expand(model, sample=sample, **settings)

    assert "\n" not in str(caught.value)
    assert_equal_states(state(model), before)
    assert torch.equal(torch.get_rng_state(), position)


@pytest.mark.parametrize("name", ["bert", "t5_decoder"])
def test_blocks_that_cannot_start_without_effect_or_be_copied_are_refused(name):
    family = FAMILIES[name]
    model = family.build()
    before = state(model)
    where = f"{family.blocks}.0"
    with pytest.raises(EsperError, match=r"does not return its input|relative_attention_bias"):
        esper.expand(model, sample=family.sample(), blocks=1, where=where)
    assert_equal_states(state(model), before)


def test_model_that_runs_one_block_several_times_is_refused():
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "embedding_size": 8}
    model = AlbertModel(AlbertConfig(vocab_size=20, num_hidden_layers=3, **sizes)).eval()
    before = state(model)
    with pytest.raises(EsperError, match=r"runs 0 times in one forward"):
        esper.expand(model, sample=torch.arange(6)[None], blocks=1)
    assert_equal_states(state(model), before)


def test_expanded_model_is_refused_until_it_is_finished():
    model = net()
    expanded = esper.expand(model, sample=SAMPLE, blocks=1)
    before = state(model)
    with pytest.raises(EsperError, match=r"^this Net is expanded already; call finish\(\)"):
        esper.expand(model, sample=SAMPLE, rank=4)
    assert_equal_states(state(model), before)
    expanded.finish()
    with pytest.raises(EsperError, match=r"^original\(\) came after finish"):
        expanded.original().__enter__()
    assert esper.expand(model, sample=SAMPLE, blocks=1).places == ("blocks.3",)


def test_finish_inside_the_context_of_the_old_model_is_refused():
    expanded = esper.expand(net(), sample=SAMPLE, blocks=1)
    with expanded.original(), pytest.raises(EsperError, match=r"inside original\(\)"):
        expanded.finish()
    assert len(expanded.finish().blocks) == 4


# --- interruptions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"blocks": 2}, {"widen": 4}, {"rank": 4}], ids=str)
def test_expand_interrupted_at_any_line_leaves_the_model_unchanged(settings):
    def build() -> Net:
        model = net()
        model.head.bias.requires_grad_(False)
        return model

    with interrupted(-1) as lines:
        esper.expand(build(), sample=SAMPLE, **settings)
    total = lines[0]
    undone = 0
    for number in range(40):
        model = build()
        before = state(model)
        try:
            with interrupted(1 + number * total // 40, signalled=number % 2 == 0):
                expanded = esper.expand(model, sample=SAMPLE, **settings)
        except KeyboardInterrupt:
            undone += 1
            assert_equal_states(state(model), before)
        else:
            assert expanded.trainable
    assert undone > 30


def test_context_interrupted_at_any_line_leaves_the_expanded_model():
    model = net()
    expanded = esper.expand(model, sample=SAMPLE, blocks=2, train="all")
    train(model, optimizer_of(expanded), SAMPLE)
    before = state(model)

    def use() -> None:
        with expanded.original():
            output(model, SAMPLE)

    with interrupted(-1) as lines:
        use()
    stopped = 0
    for line in range(1, lines[0], max(1, lines[0] // 60)):
        try:
            with interrupted(line):
                use()
        except KeyboardInterrupt:
            stopped += 1
        assert_equal_states(state(model), {**before})
    assert stopped > 30


# --- training loops of others -------------------------------------------------------------------------------


def examples(family: Family) -> list[dict[str, Tensor]]:
    rows = family.sample()["input_ids"]
    return [{"input_ids": row, "labels": row} for row in rows] * 4


def check_only_new_moved(model: PreTrainedModel, expanded: Expanded, start: dict[str, Tensor]) -> None:
    moved = {n for n, p in model.named_parameters() if not torch.equal(p.detach().cpu(), start[n])}
    assert moved == set(expanded.trainable)


@pytest.mark.parametrize("settings", [BLOCKS, WIDER], ids=str)
def test_trainer_of_transformers_trains_the_new_parameters_and_resumes_from_its_checkpoint(
    settings, tmp_path
):
    from transformers import Trainer, TrainingArguments

    family = FAMILIES["llama"]
    sample, data = family.sample(), examples(family)

    def trainer(steps: int) -> tuple[Trainer, Expanded]:
        model = family.build()
        torch.manual_seed(3)
        expanded = esper.expand(model, sample=sample, **settings)
        arguments = TrainingArguments(
            str(tmp_path / "runs"),
            max_steps=steps,
            save_steps=2,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            per_device_train_batch_size=2,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            seed=0,
        )
        return Trainer(model, arguments, train_dataset=data), expanded

    whole, expanded = trainer(4)
    model = whole.model
    before = output(model, sample)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    whole.train()
    check_only_new_moved(model, expanded, start)
    with expanded.original():
        assert torch.equal(output(model, sample), before)
    resumed, _ = trainer(4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "runs" / "checkpoint-2"))
    assert torch.equal(output(resumed.model, sample), output(model, sample))


def test_lightning_trains_the_new_parameters(tmp_path):
    import lightning

    model = net()
    before = output(model, SAMPLE)
    expanded = esper.expand(model, sample=SAMPLE, **RANK)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Any, _: int) -> Tensor:
            [x, y] = batch
            return F.cross_entropy(self.net(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(expanded)

    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    known = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
    }
    trainer = lightning.Trainer(max_epochs=2, default_root_dir=tmp_path, enable_model_summary=False, **known)
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=16))
    model.eval()
    check_only_new_moved(model, expanded, start)
    trained = output(model, SAMPLE)
    with expanded.original():
        assert torch.equal(output(model, SAMPLE), before)
    torch.testing.assert_close(output(expanded.finish(), SAMPLE), trained, rtol=1e-4, atol=1e-5)


def test_accelerate_trains_the_new_parameters():
    from accelerate import Accelerator

    model = net()
    expanded = esper.expand(model, sample=SAMPLE, blocks=1)
    accelerator = Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, optimizer_of(expanded))
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    for x, y in BATCHES:
        accelerator.backward(F.cross_entropy(prepared(x), y))
        optimizer.step()
        optimizer.zero_grad()
    check_only_new_moved(accelerator.unwrap_model(prepared), expanded, start)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_processes_train_the_new_parameters_to_equal_weights(how, tmp_path):
    program = [sys.executable, "tests/growth/expanding_processes.py", str(tmp_path), how]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["src", "."]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second = ((tmp_path / rank).read_text() for rank in "01")
    assert first == second
    assert first.startswith("done")
