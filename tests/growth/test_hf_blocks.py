"""Copied blocks in models of ``transformers``: birth, training, generation, and files that are read without
Esper."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from esper import Growth
from esper.kasmina.edits import LAYER_NUMBERS
from esper.leyline.errors import BlueprintError
from tests.growth.hf_families import FAMILIES, Family

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


def growth_of(net: nn.Module, sample: Any, slots: list[str]) -> Growth:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    return Growth(net, optimizer, sample=sample, slots=slots, higher_is_better=False, controller=None)


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
    return Grown(
        net, before, at_birth, refusal, off, on, new, moved, trained, blocks_before, config_before
    )


@pytest.fixture(scope="module")
def grown() -> Iterator[Callable[[str], Grown]]:
    """Function that grows a model of a family once in this module."""
    made: dict[str, Grown] = {}

    def of(name: str) -> Grown:
        if name not in made:
            made[name] = grow(FAMILIES[name])
        return made[name]

    yield of


def layer_numbers(blocks: nn.Module) -> dict[str, list[int]]:
    """Return the layer numbers that the blocks store, by module and attribute."""
    found: dict[str, list[int]] = {}
    for block in blocks:
        for path, module in block.named_modules():
            for name in LAYER_NUMBERS:
                if isinstance(vars(module).get(name), int):
                    found.setdefault(f"{path}.{name}", []).append(getattr(module, name))
    return found


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
    assert all(numbers == list(range(count + 1)) for numbers in layer_numbers(blocks).values())
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
        [sys.executable, "-W", "ignore", "-c", script, str(folder)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
