"""Saved networks: files from any loop, state dicts kept during growth, models of transformers, Lightning."""

import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from transformers import BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM

import esper
import esper.hf
from esper.growth import Growth, GrowthWarning
from esper.leyline.errors import EsperError, HostError
from esper.lightning import GrowthCallback, load_from_checkpoint
from tests.growth.models import OneBlock, ResNet, mlp
from tests.growth.test_grow import grow, network
from tests.growth.test_hf import callback as hf_callback
from tests.growth.test_hf import trainer as hf_trainer
from tests.growth.test_lightning import Classifier, callback, loader, trainer
from tests.growth.test_widening import IMAGES, TOKENS, VECTORS, step

ROOT = Path(__file__).parents[2]


class Case(NamedTuple):
    """Network with seeds."""

    build: Callable[[], nn.Module]
    x: Tensor
    seeds: tuple[tuple[str, str, float], ...]
    """Slot, blueprint and alpha of every seed."""


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(torch.tanh(self.up(h)))


class Single(nn.Module):
    """Network whose block is not in a container."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Linear(5, 8), Residual(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embed(x)))


CASES = {
    "side modules": Case(mlp, VECTORS, (("0", "mlp_small", 1.0), ("2", "norm", 0.25))),
    "merged seed": Case(mlp, VECTORS, (("2", "lora", 0.5),)),
    "hidden units": Case(mlp, VECTORS, (("0", "widen", 0.5), ("2", "lora_large", 1.0))),
    "units with BatchNorm": Case(ResNet, IMAGES, (("layer2.0", "widen", 1.0), ("stem.0", "conv_light", 1.0))),
    "block": Case(OneBlock, TOKENS, (("blocks.0", "stack", 1.0),)),
    "block at alpha 0.5": Case(OneBlock, TOKENS, (("blocks.0", "stack", 0.5),)),
    "block, units and side module": Case(
        OneBlock,
        TOKENS,
        (("blocks.0", "stack", 0.5), ("blocks.0.up", "widen", 1.0), ("embed", "mlp_small", 1.0)),
    ),
    "block of a Sequential": Case(ResNet, IMAGES, (("layer1.0", "stack", 0.5),)),
    "copied block as side module": Case(Single, VECTORS, (("block", "stack", 0.5),)),
}
every_case = pytest.mark.parametrize("name", CASES)


class Grown(NamedTuple):
    """Network that has trained with its seeds."""

    net: nn.Module
    optimizer: torch.optim.Optimizer
    growth: Growth
    x: Tensor

    def output(self) -> Tensor:
        return output_of(self.net, self.x)

    def train(self, steps: int = 3) -> None:
        self.net.train()
        for _ in range(steps):
            step(self.net, self.optimizer, self.x)


def started(name: str) -> Grown:
    torch.manual_seed(0)
    case = CASES[name]
    net = case.build()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    slots = [slot for slot, _, _ in case.seeds]
    growth = Growth(net, optimizer, sample=case.x, slots=slots, controller=None, mode="min")
    return Grown(net, optimizer, growth, case.x)


def trained(name: str) -> Grown:
    found = started(name)
    for slot, blueprint, alpha in CASES[name].seeds:
        found.growth.germinate(slot, blueprint, alpha=alpha)
    found.train()
    return found


@torch.no_grad()
def output_of(net: nn.Module, x: Tensor) -> Tensor:
    return net.eval()(x)


def assert_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def new(name: str) -> nn.Module:
    torch.manual_seed(7)
    return CASES[name].build()


# --- files --------------------------------------------------------------------------------------------------


@every_case
def test_file_of_a_growing_and_of_the_finished_network_loads_with_equal_outputs(name, tmp_path) -> None:
    grown = trained(name)
    wanted = grown.output()
    before = {key: value.clone() for key, value in grown.net.state_dict().items()}
    grown.growth.save(tmp_path / "growing")
    assert all(torch.equal(value, before[key]) for key, value in grown.net.state_dict().items())
    grown.growth.finish()
    grown.growth.save(tmp_path / "finished")
    for file in ("growing", "finished"):
        base = new(name)
        assert not torch.allclose(output_of(base, grown.x), wanted)
        loaded = esper.load(tmp_path / file, base=base)
        assert loaded is base
        assert_close(output_of(loaded, grown.x), wanted)
        assert not any("esper" in type(module).__module__ for module in loaded.modules())


def test_file_of_a_network_that_grew_twice_loads_into_a_new_network(tmp_path) -> None:
    grown = trained("block, units and side module")
    grown.growth.finish()
    net = grown.net
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    again = Growth(net, optimizer, sample=TOKENS, slots=["blocks.1", "embed"], controller=None, mode="min")
    again.germinate("blocks.1", "stack")
    again.germinate("embed", "mlp_small")
    for _ in range(3):
        step(net, optimizer, TOKENS)
    again.save(tmp_path / "twice")
    loaded = esper.load(tmp_path / "twice", base=OneBlock())
    assert_close(output_of(loaded, TOKENS), output_of(net, TOKENS))
    third = Growth(loaded, sample=TOKENS, slots="embed", controller=None, mode="min")
    third.save(tmp_path / "thrice")
    reloaded = esper.load(tmp_path / "thrice", base=OneBlock())
    assert_close(output_of(reloaded, TOKENS), output_of(net, TOKENS))


def test_grown_writes_the_weights_that_its_network_has_now(tmp_path) -> None:
    grown = grow(network(), epochs=2, controller="keep:mlp@0:1", show=lambda _: None)
    x = torch.randn(4, network()[0].in_features)
    grown.save(tmp_path / "early")
    with torch.no_grad():
        for parameter in grown.net.parameters():
            parameter.add_(0.1)
    grown.save(tmp_path / "late")
    early, late = (esper.load(tmp_path / name, base=network()) for name in ("early", "late"))
    assert torch.equal(output_of(late, x), output_of(grown.net, x))
    assert not torch.allclose(output_of(early, x), output_of(grown.net, x))
    # 0.6 kB of names and edits; the sample batch is not stored.
    tensors = load_file(tmp_path / "late")
    weights = sum(value.numel() * value.element_size() for value in tensors.values())
    assert tensors.keys() == grown.net.state_dict().keys()
    assert (tmp_path / "late").stat().st_size < weights + 3_000


class Tied(nn.Module):
    """Network whose output layer has the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(self.embed(x))))


def test_file_contains_tied_weights_once_and_a_loaded_network_has_them_tied(tmp_path) -> None:
    torch.manual_seed(0)
    net = Tied()
    growth = Growth(net, sample=TOKENS, slots="layer", controller=None, mode="min")
    growth.germinate("layer", "mlp_small")
    growth.save(tmp_path / "tied")
    assert "head.weight" not in load_file(tmp_path / "tied")
    loaded = esper.load(tmp_path / "tied", base=Tied())
    assert loaded.head.weight is loaded.embed.weight
    assert torch.equal(output_of(loaded, TOKENS), output_of(net, TOKENS))


class WithNote(nn.Module):
    """Network whose state dict has an entry that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


def test_network_whose_state_dict_has_more_than_tensors_is_not_saved(tmp_path) -> None:
    growth = Growth(WithNote(), sample=VECTORS, slots="layer", controller=None, mode="min")
    with pytest.raises(
        HostError, match=r"the state dict of WithNote has a dict under '_extra_state', and a file"
    ):
        growth.save(tmp_path / "note")
    assert not (tmp_path / "note").exists()


@pytest.mark.parametrize("state", ["is growing", "has grown"])
def test_network_that_has_grown_is_refused_as_base_and_unchanged(state, tmp_path) -> None:
    grown = trained("side modules")
    grown.growth.save(tmp_path / "net")
    if state == "has grown":
        grown.growth.finish()
    wanted, names = grown.output(), list(grown.net.state_dict())
    with pytest.raises(HostError, match=f"^this Sequential {state} already; pass a new Sequential as base$"):
        esper.load(tmp_path / "net", base=grown.net)
    assert list(grown.net.state_dict()) == names
    assert torch.equal(grown.output(), wanted)


def test_network_of_another_width_is_refused_as_base_after_its_blocks_and_units_were_built(tmp_path) -> None:
    trained("block, units and side module").growth.save(tmp_path / "net")

    class Wide(OneBlock):
        __qualname__ = OneBlock.__qualname__

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(self.head.in_features, self.head.out_features + 1, bias=False)

    base = Wide()
    before = {name: value.clone() for name, value in base.state_dict().items()}
    with pytest.raises(HostError, match=r"does not fit this OneBlock: head\.weight has shape") as raised:
        esper.load(tmp_path / "net", base=base)
    assert "\n" not in str(raised.value)
    assert base.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in base.state_dict().items())
    base(TOKENS)


# --- state dicts --------------------------------------------------------------------------------------------


@every_case
def test_state_dict_kept_during_growth_loads_before_and_after_finish(name) -> None:
    grown = trained(name)
    wanted, kept = grown.output(), copy.deepcopy(grown.net.state_dict())
    grown.train()
    assert not torch.allclose(grown.output(), wanted)
    grown.net.load_state_dict(kept)
    assert torch.equal(grown.output(), wanted)
    grown.train()
    grown.growth.finish()
    grown.train()
    assert not torch.allclose(grown.output(), wanted)
    twin = copy.deepcopy(grown.net)
    for net in (grown.net, twin):
        net.load_state_dict(kept)
        assert_close(output_of(net, grown.x), wanted)
        assert net.state_dict().keys() == grown.net.state_dict().keys()


@every_case
def test_state_dict_kept_during_growth_loads_into_a_network_read_from_a_file(name, tmp_path) -> None:
    grown = trained(name)
    wanted, kept = grown.output(), copy.deepcopy(grown.net.state_dict())
    grown.train()
    grown.growth.save(tmp_path / "net")
    loaded = esper.load(tmp_path / "net", base=new(name))
    loaded.load_state_dict(kept)
    assert_close(output_of(loaded, grown.x), wanted)


def test_merged_weights_equal_those_of_a_network_that_finishes_with_the_kept_weights() -> None:
    grown = trained("merged seed")
    kept = copy.deepcopy(grown.net.state_dict())
    twin = trained("merged seed")
    grown.train()
    grown.growth.finish()
    grown.net.load_state_dict(kept)
    wanted = twin.growth.finish().state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in grown.net.state_dict().items())


def test_state_dict_of_an_average_kept_during_growth_loads_after_finish() -> None:
    grown = trained("hidden units")
    average = AveragedModel(grown.net)
    grown.growth.follow(average)
    average.update_parameters(grown.net)
    grown.train()
    average.update_parameters(grown.net)
    wanted, kept = output_of(average, grown.x), copy.deepcopy(average.state_dict())
    grown.growth.finish()
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.zero_()
    average.load_state_dict(kept)
    assert_close(output_of(average, grown.x), wanted)


def test_network_pickled_after_finish_loads_the_state_dict_of_the_finished_network() -> None:
    grown = trained("hidden units")
    grown.growth.finish()
    state, wanted = copy.deepcopy(grown.net.state_dict()), grown.output()
    twin = pickle.loads(pickle.dumps(grown.net))
    twin.load_state_dict(state)
    assert torch.equal(output_of(twin, grown.x), wanted)
    Growth(twin, sample=grown.x, slots="2", controller=None, mode="min").finish()


OTHER = {
    "kept before the seed": ("side modules", "no seed, and this network has"),
    "kept before the units": ("hidden units", "no seed, and this network has"),
    "kept before the block": ("block", "1 blocks in 'blocks', and this network has 2"),
}


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("name", OTHER)
def test_state_dict_of_another_set_of_seeds_is_refused_and_changes_nothing(name, finished) -> None:
    case, words = OTHER[name]
    grown = started(case)
    kept = copy.deepcopy(grown.net.state_dict())
    for slot, blueprint, _ in CASES[case].seeds:
        grown.growth.germinate(slot, blueprint)
    grown.train()
    if finished:
        grown.growth.finish()
    assert_refused(grown, kept, words)


def assert_refused(grown: Grown, kept: dict[str, Any], words: str) -> None:
    before = copy.deepcopy(grown.net.state_dict())
    with pytest.raises(HostError, match=f"^the state has {words}") as raised:
        grown.net.load_state_dict(kept)
    assert "\n" not in str(raised.value)
    found = grown.net.state_dict()
    assert found.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in found.items())


@pytest.mark.parametrize("finished", [False, True])
def test_state_dict_with_a_seed_that_was_removed_or_raised_is_refused(finished) -> None:
    grown = trained("side modules")
    kept = copy.deepcopy(grown.net.state_dict())
    grown.growth.prune("2")
    grown.growth.germinate("2", "lora")
    if finished:
        grown.growth.finish()
    both = r"mlp_small \(linear_add\) in 0, norm \(linear_add\) in 2, and this network has mlp_small"
    assert_refused(grown, kept, both)


def test_state_dict_with_another_alpha_than_that_of_finish_is_refused() -> None:
    grown = trained("side modules")
    kept = copy.deepcopy(grown.net.state_dict())
    grown.growth.set_alpha("2", 1.0)
    grown.growth.finish()
    words = r"norm \(linear_add\) in 2 at alpha 0.25, and this network was finished at alpha 1"
    assert_refused(grown, kept, words)


def test_part_of_a_state_dict_loads_into_a_growing_network_and_keeps_its_seeds() -> None:
    grown = trained("side modules")
    part = {"4.weight": torch.zeros(3, 8)}
    missing = grown.net.load_state_dict(part, strict=False).missing_keys
    assert "2.esper_slot.graft.alpha" in missing
    assert torch.equal(grown.net[4].weight, part["4.weight"])
    assert len(grown.growth.reports()) == 2


def test_state_of_the_network_alone_is_refused_by_a_fresh_growth_and_the_message_names_the_call() -> None:
    grown, fresh = trained("side modules"), started("side modules")
    assert_refused(
        fresh, grown.net.state_dict(), r"mlp_small .* and this network has no seed; call growth\.load"
    )
    fresh.growth.load_state_dict(grown.growth.state_dict())
    fresh.net.load_state_dict(grown.net.state_dict())
    held = {id(p) for group in fresh.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in fresh.net.parameters()}
    assert torch.equal(fresh.output(), grown.output())


# --- transformers -------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16}
MODELS = {
    "side module and block at alpha 0.5": (
        lambda: LlamaForCausalLM(
            LlamaConfig(
                **SIZES,
                num_hidden_layers=2,
                intermediate_size=24,
                num_attention_heads=2,
                num_key_value_heads=2,
            )
        ),
        (("model.layers.0", "stack", 0.5), ("model.layers.1.mlp", "lora", 1.0)),
    ),
    "hidden units without an attribute": (
        lambda: BloomForCausalLM(BloomConfig(**SIZES, n_layer=2, n_head=2)),
        (("transformer.h.0", "stack", 1.0), ("transformer.h.1", "widen", 1.0)),
    ),
}
INPUT = torch.arange(12).view(2, 6)
READ = """
import sys, torch, esper.hf
torch.set_num_threads(1)
x = torch.arange(12).view(2, 6)
for folder in sys.argv[1:]:
    net, wanted = esper.hf.from_pretrained(folder), torch.load(folder + "/wanted")
    assert torch.equal(net(x).logits, wanted), "other logits"
    net.save_pretrained(folder + "/again")
    assert torch.equal(esper.hf.from_pretrained(folder + "/again")(x).logits, wanted), "other logits again"
"""


def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    build, seeds = MODELS[name]
    net = build()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    slots = [slot for slot, _, _ in seeds]
    sample = {"input_ids": INPUT}
    growth = Growth(net, optimizer, sample=sample, slots=slots, controller=None, mode="min")
    for slot, blueprint, alpha in seeds:
        growth.germinate(slot, blueprint, alpha=alpha)
    for _ in range(3):
        optimizer.zero_grad()
        net(input_ids=INPUT, labels=INPUT).loss.backward()
        optimizer.step()
    with pytest.warns(
        GrowthWarning, match=r"would leave out .* read a folder of save_pretrained with esper\.hf"
    ):
        growth.finish()
    return net.eval()


def test_folders_of_save_pretrained_are_read_in_a_new_process_with_equal_logits(tmp_path) -> None:
    folders = [tmp_path / str(number) for number in range(len(MODELS))]
    for name, folder in zip(MODELS, folders, strict=True):
        net = model(name)
        copy.deepcopy(net).save_pretrained(folder)
        torch.save(net(INPUT).logits, folder / "wanted")
    program = [sys.executable, "-W", "ignore", "-c", READ, *map(str, folders)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_native_model_is_read_with_and_without_esper_and_has_no_file_of_edits(tmp_path) -> None:
    net = MODELS["hidden units without an attribute"][0]()
    growth = Growth(net, sample={"input_ids": INPUT}, slots="transformer.h.0", controller=None, mode="min")
    growth.germinate("transformer.h.0", "stack")
    growth.finish().eval().save_pretrained(tmp_path)
    assert not (tmp_path / "esper.json").exists()
    for read in (esper.hf.from_pretrained, BloomForCausalLM.from_pretrained):
        assert torch.equal(read(tmp_path)(INPUT).logits, net(INPUT).logits)


@pytest.mark.filterwarnings("ignore::esper.leyline.errors.GrowthWarning")
def test_damaged_file_of_edits_and_edits_of_another_model_are_refused(tmp_path) -> None:
    model("side module and block at alpha 0.5").save_pretrained(tmp_path / "llama")
    model("hidden units without an attribute").save_pretrained(tmp_path / "bloom")
    file = tmp_path / "llama" / "esper.json"
    content = file.read_bytes()
    for at in range(0, len(content), 97):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(EsperError, match=r"esper\.json' is no network that this version of Esper saved"):
            esper.hf.from_pretrained(tmp_path / "llama")
    file.write_bytes((tmp_path / "bloom" / "esper.json").read_bytes())
    with pytest.raises(HostError, match="holds a BloomForCausalLM, and base is a LlamaForCausalLM"):
        esper.hf.from_pretrained(tmp_path / "llama")


def test_folder_whose_weights_lack_a_seed_is_refused(tmp_path) -> None:
    net = model("side module and block at alpha 0.5")
    net.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for lost in ("model.norm.weight", "model.layers.2.mlp.grown.seed.one.0.weight"):
        save_file({name: value for name, value in tensors.items() if name != lost}, file, {"format": "pt"})
        with pytest.raises(
            HostError, match=f"does not fit this LlamaForCausalLM: its files have no {lost} of"
        ):
            esper.hf.from_pretrained(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_checkpoint_of_a_trainer_in_the_middle_of_growth_is_refused(tmp_path) -> None:
    ours = hf_trainer(tmp_path, [hf_callback(controller="mlp@transformer.h.0:1")], num_train_epochs=2)
    ours.train()
    with pytest.raises(
        EsperError, match="is a checkpoint of a model that was growing; resume it with a Trainer"
    ):
        esper.hf.from_pretrained(tmp_path / "checkpoint-8")


def test_configuration_that_names_no_known_class_is_refused(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["Mine"]}))
    with pytest.raises(EsperError, match=r"names Mine, which transformers does not have; pass model_class=$"):
        esper.hf.from_pretrained(tmp_path)


# --- Lightning ----------------------------------------------------------------------------------------------


class Configured(Classifier):
    """Classifier with an argument that Lightning keeps in checkpoints."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net[4] = nn.Linear(8, classes)


LOAD = """
import sys, torch
from esper.lightning import load_from_checkpoint
from tests.growth.test_saving import Configured
torch.set_num_threads(1)
module = load_from_checkpoint(Configured, sys.argv[1])
assert type(module) is Configured and module.hparams.classes == 3
x, wanted = torch.load(sys.argv[2])
torch.testing.assert_close(module.eval()(x), wanted)
assert not any("esper" in type(each).__module__ for each in module.modules())
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("weights_only", [False, True])
def test_checkpoint_of_lightning_is_read_by_the_line_that_the_error_of_lightning_names(
    tmp_path, weights_only
) -> None:
    growing = callback(
        sample=loader(4).dataset.tensors[0],
        controller="mlp@net.0:1,widen@net.2:2",
        monitor="val_loss",
        mode="min",
    )
    keep = ModelCheckpoint(tmp_path, save_last=True, save_weights_only=weights_only)
    trained = trainer(tmp_path, growing, callbacks=[growing, keep])
    module = Configured(3)
    trained.fit(module, loader(32), loader(16))
    x = loader(8).dataset.tensors[0]
    best = tmp_path / "last.ckpt"
    torch.save((x, output_of(module, x)), tmp_path / "wanted")
    with pytest.raises(RuntimeError, match=r"read with esper\.lightning\.load_from_checkpoint\(cls, path\)"):
        Configured.load_from_checkpoint(best)
    if not weights_only:
        assert_close(output_of(load_from_checkpoint(Configured, best), x), output_of(module, x))
        return
    program = [sys.executable, "-W", "ignore", "-c", LOAD, str(best), str(tmp_path / "wanted")]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore")
def test_checkpoint_of_a_finished_module_and_of_one_without_seeds_are_read(tmp_path) -> None:
    growing = callback(net="net", slots=["0", "2"], controller="mlp@0:2")
    trained = trainer(tmp_path, growing)
    module = Classifier()
    trained.fit(module, loader(32), loader(16))
    x = loader(8).dataset.tensors[0]
    wanted = output_of(module, x)
    growing.finish()
    trained.save_checkpoint(tmp_path / "finished.ckpt")
    with pytest.raises(RuntimeError, match=r"read with esper\.lightning\.load_from"):
        Classifier.load_from_checkpoint(tmp_path / "finished.ckpt")
    loaded = load_from_checkpoint(Classifier, tmp_path / "finished.ckpt")
    assert torch.equal(output_of(loaded, x), wanted)
    for load in (Classifier.load_from_checkpoint, lambda path: load_from_checkpoint(Classifier, path)):
        early = load(tmp_path / "epoch=0.ckpt")
        assert early.state_dict().keys() == Classifier().state_dict().keys()


@pytest.mark.filterwarnings("ignore")
def test_lightning_monitor_that_is_not_logged_is_refused_before_the_first_training_step(tmp_path) -> None:
    steps: list[int] = []

    class Counted(Classifier):
        def training_step(self, batch: Any, index: int) -> Tensor:
            steps.append(index)
            return super().training_step(batch, index)

    growing = GrowthCallback(sample=torch.zeros(2, 4), monitor="val_f1", mode="max", slots=["net.0"])
    words = "logged no number as 'val_f1'; monitor= allows what it logs: val_loss, val_acc$"
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    with pytest.raises(EsperError, match=words):
        Trainer(max_epochs=1, callbacks=[growing], accelerator="cpu", default_root_dir=tmp_path, **quiet).fit(
            Counted(), loader(32), loader(16)
        )
    assert steps == []
