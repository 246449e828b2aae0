"""Copied blocks in models of ``transformers``: birth, training, generation, and files that are read without
Esper."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, LlamaConfig, PreTrainedModel

from esper import Growth
from esper.kasmina.edits import LAYER_NUMBERS
from esper.leyline.errors import BlueprintError, GrowthWarning
from tests.growth.hf_families import EXPERTS, FAMILIES, FOUR, HEADS, LAYERS, LLAMA, WIDTH, Family, images

# Warnings raised by other packages are ignored; warnings of Esper fail a test.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error::esper.leyline.errors.GrowthWarning"),
]
RESIDUAL = [name for name, family in FAMILIES.items() if family.is_residual]
POST_NORM = [name for name, family in FAMILIES.items() if not family.is_residual]
STEPS = 20


class Grown(NamedTuple):
    """Finished model of a family, with what was seen while it grew."""

    net: PreTrainedModel
    before: Tensor
    """Logits before the block was planted."""
    at_birth: Tensor | None
    """Logits with a block without effect; None if it was refused."""
    refusal: str
    off: Tensor
    """Logits with a copied block at alpha 0."""
    on: Tensor
    """Logits with a copied block at alpha 1."""
    new: set[str]
    """Names of the parameters of the block that stays."""
    moved: set[str]
    """Names of the parameters that moved while all others were frozen."""
    trained: Tensor
    """Logits after training, before ``finish``."""
    blocks_before: int
    config_before: dict[str, Any]


@torch.no_grad()
def logits(net: nn.Module, sample: dict[str, Tensor]) -> Tensor:
    mode = net.training
    found = net.eval()(**sample).logits
    net.train(mode)
    return found


def train(net: nn.Module, optimizer: torch.optim.Optimizer, sample: dict[str, Tensor], steps: int) -> None:
    net.train()
    for _ in range(steps):
        loss = net(**sample).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    net.eval()


def growth_of(net: nn.Module, sample: Any, slots: str | list[str]) -> Growth:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    return Growth(net, optimizer, sample=sample, slots=slots, mode="min", controller=None)


def grow(family: Family) -> Grown:
    """Plant a copy of the second block, without effect if possible, train it alone and then everything."""
    net, sample = family.build(), family.sample()
    config_before, blocks_before = net.config.to_dict(), len(net.get_submodule(family.blocks))
    growth = growth_of(net, sample, [f"{family.blocks}.1"])
    [optimizer] = growth.network.groups.optimisers
    train(net, optimizer, sample, 1)
    before, old = logits(net, sample), list(net.parameters())

    growth.germinate(growth.slots[0], "stack", alpha=0.0)
    off = logits(net, sample)
    growth.set_alpha(growth.slots[0], 1.0)
    on = logits(net, sample)
    growth.prune(growth.slots[0])
    assert torch.equal(logits(net, sample), before)

    at_birth, refusal = None, ""
    try:
        growth.germinate(growth.slots[0], "stack", zero=True)
        at_birth = logits(net, sample)
    except BlueprintError as error:
        refusal = str(error)
        growth.germinate(growth.slots[0], "stack")
    new = {name for name, p in net.named_parameters() if all(p is not other for other in old)}

    for parameter in old:
        parameter.requires_grad_(False)
    start = {name: value.clone() for name, value in net.state_dict().items()}
    train(net, optimizer, sample, 3)
    moved = {name for name, value in net.state_dict().items() if not torch.equal(value, start[name])}
    for parameter in old:
        parameter.requires_grad_(True)
    train(net, optimizer, sample, STEPS)
    trained = logits(net, sample)
    growth.finish()
    return Grown(net, before, at_birth, refusal, off, on, new, moved, trained, blocks_before, config_before)


@pytest.fixture(scope="module")
def grown() -> Callable[[str], Grown]:
    """Function that grows a model of a family once in this module."""
    made: dict[str, Grown] = {}

    def of(name: str) -> Grown:
        if name not in made:
            made[name] = grow(FAMILIES[name])
        return made[name]

    return of


def layer_numbers(blocks: nn.Module) -> list[set[int]]:
    """Return all layer numbers in every block."""
    return [
        {
            value
            for module in block.modules()
            for name, value in vars(module).items()
            if name in LAYER_NUMBERS and value is not None
        }
        for block in blocks
    ]


# --- one block per family -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RESIDUAL)
def test_logits_are_bit_equal_after_a_block_with_zeroed_output_projections_is_planted(name, grown):
    found = grown(name)

    assert found.refusal == ""
    assert torch.equal(found.at_birth, found.before)


@pytest.mark.parametrize("name", POST_NORM)
def test_block_without_effect_is_refused_where_the_block_is_not_residual(name, grown):
    found = grown(name)

    assert "does not return its input when all its weights are zero" in found.refusal
    assert found.refusal.count(". ") == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_bit_equal_at_alpha_zero_and_differ_at_alpha_one(name, grown):
    found = grown(name)

    assert torch.equal(found.off, found.before)
    assert not torch.equal(found.on, found.before)


@pytest.mark.parametrize("name", FAMILIES)
def test_only_parameters_of_the_new_block_move_when_all_others_are_frozen(name, grown):
    found = grown(name)

    assert found.moved == found.new


@pytest.mark.parametrize("name", FAMILIES)
def test_finished_model_returns_the_logits_of_the_trained_model(name, grown):
    found = grown(name)

    assert torch.equal(logits(found.net, FAMILIES[name].sample()), found.trained)
    assert not torch.equal(found.trained, found.before)
    assert not any(type(module).__module__.startswith("esper") for module in found.net.modules())


@pytest.mark.parametrize("name", FAMILIES)
def test_layer_numbers_and_configuration_count_the_new_block(name, grown):
    family, found = FAMILIES[name], grown(name)
    blocks, config = found.net.get_submodule(family.blocks), found.net.config
    count = found.blocks_before

    assert len(blocks) == count + 1
    assert all(numbers <= {position} for position, numbers in enumerate(layer_numbers(blocks)))
    assert layer_numbers(blocks)[0] == {0} or name in {"vit", "deberta_v2"}  # Their blocks have no numbers.
    assert getattr(config, family.count) == count + 1
    for key, value in found.config_before.items():
        if isinstance(value, list) and len(value) == count and "layer" in key:
            assert getattr(config, key) == [*value[:2], value[1], *value[2:]]


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].inputs is None])
def test_greedy_generation_with_a_cache_equals_generation_without(name, grown):
    net, inputs = grown(name).net, FAMILIES[name].sample()
    del inputs["labels"]
    with_cache, without = (
        net.generate(**inputs, max_new_tokens=5, min_new_tokens=5, do_sample=False, use_cache=use_cache)
        for use_cache in (True, False)
    )

    assert with_cache.tolist() == without.tolist()


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "bloom", "t5_encoder"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_generation_with_a_cache_is_right_while_a_block_is_blended(name, dtype):
    family = FAMILIES[name]
    net, sample = family.build().to(dtype), family.sample()
    before, growth = logits(net, sample), growth_of(net, sample, [f"{family.blocks}.1"])
    growth.germinate(growth.slots[0], "stack", zero=True)
    assert torch.equal(logits(net, sample), before)
    growth.prune(growth.slots[0])
    growth.germinate(growth.slots[0], "stack", alpha=0.5)
    assert not torch.equal(logits(net, sample), before)
    assert {parameter.dtype for parameter in net.parameters()} == {dtype}
    prompt = {"input_ids": sample["input_ids"], "max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    assert net.generate(**prompt).tolist() == net.generate(**prompt, use_cache=False).tolist()


READER = """
import sys
sys.modules["esper"] = None  # Importing Esper fails in this process.
import copy, pathlib, torch, transformers
for folder in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    sample, wanted = torch.load(folder / "outputs.pt")
    kind = getattr(transformers, transformers.AutoConfig.from_pretrained(folder).architectures[0])
    read = kind.from_pretrained(folder).eval()
    whole = torch.load(folder / "whole.pt", weights_only=False).eval()
    for how, net in (("from_pretrained", read), ("torch.load", whole), ("deepcopy", copy.deepcopy(whole))):
        with torch.no_grad():
            if not torch.equal(net(**sample).logits, wanted):
                print(folder.name, how)
assert not any(name.startswith("esper.") for name in sys.modules)
print("read", len(list(pathlib.Path(sys.argv[1]).iterdir())))
"""


def test_finished_models_are_read_in_a_process_without_esper_with_bit_equal_logits(tmp_path, grown):
    for name, family in FAMILIES.items():
        net, folder = grown(name).net, tmp_path / name
        net.save_pretrained(folder)
        torch.save(net, folder / "whole.pt")
        torch.save((family.sample(), logits(net, family.sample())), folder / "outputs.pt")

    assert output_of(READER, tmp_path) == [f"read {len(FAMILIES)}"]


def output_of(script: str, folder: Path) -> list[str]:
    """Return the lines that a script prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(folder)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# --- several blocks, other inputs, and networks around a model ----------------------------------------------


def saved_and_read(net: PreTrainedModel, folder: Path) -> PreTrainedModel:
    net.save_pretrained(folder)
    return type(net).from_pretrained(folder).eval()


@pytest.mark.parametrize("name", ["llama", "gemma3", "smollm3", "bert"])
def test_two_blocks_in_one_model_are_removed_and_planted_in_any_order(name, tmp_path):
    family = FAMILIES[name]
    net, sample = family.build(), family.sample()
    slots = [f"{family.blocks}.{number}" for number in (0, 2)]
    before = logits(net, sample)
    config, growth = net.config.to_dict(), growth_of(net, sample, slots)
    growth.germinate(slots[1], "stack", alpha=0.0)
    growth.germinate(slots[0], "stack", alpha=0.0)
    assert torch.equal(logits(net, sample), before)
    growth.prune(slots[1])
    assert torch.equal(logits(net, sample), before)
    growth.prune(slots[0])
    assert net.config.to_dict() == config
    assert torch.equal(logits(net, sample), before)
    growth.germinate(slots[0], "stack", zero=family.is_residual)
    growth.germinate(slots[1], "stack", zero=family.is_residual)
    assert torch.equal(logits(net, sample), before) is family.is_residual

    [optimizer] = growth.network.groups.optimisers
    train(net, optimizer, sample, 3)
    trained = logits(net, sample)
    growth.finish()
    blocks = net.get_submodule(family.blocks)
    assert len(blocks) == net.config.num_hidden_layers == config["num_hidden_layers"] + 2
    assert [p for group in optimizer.param_groups for p in group["params"]] == list(net.parameters())
    assert torch.equal(logits(saved_and_read(net, tmp_path), sample), trained)


def test_block_of_the_encoder_and_block_of_the_decoder_grow_in_one_t5(tmp_path):
    family = FAMILIES["t5_encoder"]
    net, sample = family.build(), family.sample()
    before, slots = logits(net, sample), ["encoder.block.2", "decoder.block.1"]
    growth = growth_of(net, sample, slots)
    for slot in slots:
        growth.germinate(slot, "stack", zero=True)
    assert torch.equal(logits(net, sample), before)
    train(net, growth.network.groups.optimisers[0], sample, 3)
    trained = logits(net, sample)
    growth.finish()

    assert (net.config.num_layers, net.config.num_decoder_layers) == (5, 4)
    assert (net.encoder.config.num_layers, net.decoder.config.num_layers) == (5, 4)
    assert torch.equal(logits(saved_and_read(net, tmp_path), sample), trained)
    prompt = {"input_ids": sample["input_ids"], "max_new_tokens": 4, "do_sample": False}
    assert net.generate(**prompt).tolist() == net.generate(**prompt, use_cache=False).tolist()


def test_first_block_of_t5_is_refused_because_only_it_has_position_biases():
    family = FAMILIES["t5_decoder"]
    net = family.build()
    growth, config = growth_of(net, family.sample(), ["decoder.block.0"]), net.config.to_dict()
    with pytest.raises(BlueprintError, match=r"decoder\.block\.1\..*relative_attention_bias"):
        growth.germinate("decoder.block.0", "stack")
    assert len(net.decoder.block) == 3
    assert net.config.to_dict() == config


@pytest.mark.parametrize("name", ["llama", "gpt2", "vit"])
@pytest.mark.parametrize("attentions", [False, True])
def test_recorded_hidden_states_include_the_blended_output_of_the_new_block(name, attentions):
    family = FAMILIES[name]
    net, sample = family.build(), family.sample() | {"output_hidden_states": True}
    if attentions:
        net.set_attn_implementation("eager")
        sample |= {"output_attentions": True}
    before = net(**sample)
    growth = growth_of(net, sample, [f"{family.blocks}.1"])
    growth.germinate(growth.slots[0], "stack")
    full = net(**sample).hidden_states
    growth.set_alpha(growth.slots[0], 0.0)
    off = net(**sample)

    assert torch.equal(off.logits, before.logits)
    assert not torch.equal(full[3], full[2])
    assert torch.equal(off.hidden_states[3], off.hidden_states[2])
    assert all(map(torch.equal, [*off.hidden_states[:3], *off.hidden_states[4:]], before.hidden_states))
    if attentions:
        assert len(off.attentions) == len(before.attentions) + 1
    growth.set_alpha(growth.slots[0], 0.5)
    half = net(**sample)
    assert torch.equal(half.hidden_states[3], full[2] + 0.5 * (full[3] - full[2]))
    with pytest.warns(GrowthWarning, match="alphas of blocks below 1"):
        growth.finish()
    assert all(map(torch.equal, net(**sample).hidden_states, half.hidden_states))


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_auto_finds_all_blocks_of_a_model_that_returns_its_hidden_states(name):
    family = FAMILIES[name]
    sample = family.sample() | {"output_hidden_states": True}

    found = growth_of(family.build(), sample, "auto").slots

    assert found == growth_of(family.build(), family.sample(), "auto").slots
    assert found == tuple(f"{family.blocks}.{number}" for number in range(3))


@pytest.mark.parametrize("name", ["llama", "gemma2", "t5_decoder"])
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_gradients_with_gradient_checkpointing_equal_those_without(name, alpha):
    family = FAMILIES[name]
    net, sample = family.build(), family.sample()
    growth = growth_of(net, sample, [f"{family.blocks}.1"])
    growth.germinate(growth.slots[0], "stack", alpha=alpha)
    found = []
    for _ in range(2):
        net.zero_grad()
        net.train()
        torch.manual_seed(0)
        net(**sample).loss.backward()
        found.append([None if p.grad is None else p.grad.clone() for p in net.parameters()])
        net.gradient_checkpointing_enable({"use_reentrant": False})

    assert net.is_gradient_checkpointing
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_model_with_gradient_checkpointing_grows_trains_and_is_saved(tmp_path):
    family = FAMILIES["llama"]
    net, sample = family.build(), family.sample()
    net.gradient_checkpointing_enable()
    before, growth = logits(net, sample), growth_of(net, sample, [f"{family.blocks}.1"])
    growth.germinate(growth.slots[0], "stack", zero=True)
    assert torch.equal(logits(net, sample), before)
    start = net.model.layers[2].self_attn.o_proj.weight.clone()
    train(net, growth.network.groups.optimisers[0], sample, 3)
    assert not torch.equal(net.model.layers[2].self_attn.o_proj.weight, start)
    trained = logits(net, sample)
    growth.finish()
    assert torch.equal(logits(saved_and_read(net, tmp_path), sample), trained)


class Scored(nn.Module):
    """Network of a user around a model without head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = AutoModel.from_config(LlamaConfig(**LLAMA))
        self.score = nn.Linear(WIDTH, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.score(self.backbone(tokens).last_hidden_state[:, -1])


def test_model_inside_a_network_of_a_user_grows_and_is_saved_on_its_own(tmp_path):
    net, x = Scored().eval(), FAMILIES["llama"].sample()["input_ids"]
    before, growth = net(x), growth_of(net, x, "auto")
    assert growth.slots == ("backbone.layers.0", "backbone.layers.1", "backbone.layers.2")
    growth.germinate("backbone.layers.1", "stack", zero=True)
    assert torch.equal(net(x), before)
    [optimizer] = growth.network.groups.optimisers
    for _ in range(3):
        optimizer.zero_grad()
        net(x).square().sum().backward()
        optimizer.step()
    trained = net(x)
    growth.finish()

    assert torch.equal(net(x), trained)
    assert net.backbone.config.num_hidden_layers == 4
    again = Scored().eval()
    again.backbone = saved_and_read(net.backbone, tmp_path)
    again.score = net.score
    assert torch.equal(again(x), trained)


LISTS = {
    "positions of blocks without experts": (
        Family("Qwen3MoeForCausalLM", LLAMA | HEADS | EXPERTS | FOUR | {"mlp_only_layers": [0, 3]}, LAYERS),
        "mlp_only_layers",
        [0, 4],
    ),
    "positions of blocks with experts": (
        Family("Qwen3MoeForCausalLM", LLAMA | HEADS | EXPERTS | FOUR | {"mlp_only_layers": [1, 2]}, LAYERS),
        "mlp_only_layers",
        [1, 2, 3],
    ),
    "count per stage": (
        Family(
            "ConvNextForImageClassification",
            {"hidden_sizes": [8, 16], "depths": [3, 3], "num_stages": 2, "patch_size": 2, "num_labels": 2},
            "convnext.encoder.stages.1.layers",
            inputs=images,
        ),
        "depths",
        [3, 4],
    ),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_in_a_configuration_count_the_new_block(name, tmp_path):
    family, attribute, wanted = LISTS[name]
    net, sample = family.build(), family.sample()
    start, before = list(getattr(net.config, attribute)), logits(net, sample)
    growth = growth_of(net, sample, [f"{family.blocks}.1"])
    growth.germinate(growth.slots[0], "stack", zero=True)
    assert torch.equal(logits(net, sample), before)
    assert getattr(net.config, attribute) == wanted
    growth.prune(growth.slots[0])
    assert getattr(net.config, attribute) == start
    growth.germinate(growth.slots[0], "stack")
    grown_logits = logits(net, sample)
    growth.finish()
    assert torch.equal(logits(saved_and_read(net, tmp_path), sample), grown_logits)
