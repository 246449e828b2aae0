"""Files of saved networks: contents, loading, and refusal of unsuitable files."""

import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from esper.kasmina import CNNHost, MorphogeneticModel, load
from esper.kasmina.blueprints import blueprint_named
from esper.kasmina.hosts import ResidualHost, TransformerHost
from esper.kasmina.network_file import save
from esper.kasmina.sites import find_sites
from esper.kasmina.slot import slots_of
from esper.leyline import Stage, Style
from esper.leyline.errors import EsperError, HostError, UnknownNameError
from tests.contracts.hosts import BatchHost, Kind, PlainImages
from tests.contracts.matrix import SLOT, Case, Trial, assert_same, batch, planted, registered, restart
from tests.kasmina.seed_episodes import DropoutSeed

BUILT_IN = {
    "cnn": lambda: CNNHost((4, 8), kernel=3, input_shape=(1, 8, 8), classes=4),
    "residual": lambda: ResidualHost(8, blocks=1, slots=2, input_shape=(1, 8, 8), classes=4),
    "gpt": lambda: TransformerHost(vocabulary=9, context=4, width=8, layers=2, dropout=0.1),
}


def grown(kind: Kind = "plain_images", blueprint: str = "conv_heavy", width: int = 4) -> Trial:
    """Return a trained network with a blended seed."""
    trial = planted(Case(blueprint, Style.GATED_GATE, kind, width), training_epochs=0)
    trial.train(2)
    trial.place(Stage.HOLDING, 0.5)
    return trial


def saved(trial: Trial, folder: Path) -> Path:
    path = folder / "deep" / "network.safetensors"
    save(trial.model.host, path)
    return path


def tensors_of(net: nn.Module) -> dict[str, Tensor]:
    """Return copies of all weights and buffers of a network, and torch's random state."""
    tensors = {name: value.clone() for name, value in net.state_dict().items()}
    return tensors | {"random state": torch.get_rng_state()}


@pytest.mark.parametrize(
    ("name", "blueprint"),
    [
        ("cnn", "norm"),
        ("cnn", "attention"),
        ("residual", "norm"),
        ("residual", "stack"),
        ("gpt", "flex_attention"),
        ("gpt", "stack"),
    ],
)
def test_network_file_of_a_built_in_host_is_loaded_without_argument_base(
    name: str, blueprint: str, tmp_path: Path
) -> None:
    restart(0)
    model = MorphogeneticModel(BUILT_IN[name]())
    model.bind_optimiser(torch.optim.SGD(model.host.parameters(), lr=0.1))
    spec = blueprint_named(blueprint, model.sites[0].topology)
    model.germinate(1, spec.index, Style.LINEAR_ADD)
    model.table.stage[0, 1], model.table.alpha[0, 1] = Stage.HOLDING, 0.5
    with torch.no_grad():
        for weight in model.slot(1).parameters():
            weight.add_(0.1)
    model.sync()
    x = model.host.sample_input(3)
    save(model.host, tmp_path / "network.safetensors")
    position = torch.get_rng_state()
    plain = load(tmp_path / "network.safetensors")
    assert torch.equal(torch.get_rng_state(), position)
    assert type(plain) is type(model.host)
    wanted = model.eval()(x)
    assert torch.equal(plain.eval()(x), wanted)
    with model.taking_part(model.without(1)):
        assert not torch.equal(model(x), wanted)


def test_saving_and_loading_change_neither_network_nor_random_state(tmp_path: Path) -> None:
    trial = grown()
    before = trial.snapshot() | trial.seed_snapshot()
    base = PlainImages(4)
    position = torch.get_rng_state()
    path = saved(trial, tmp_path)
    load(path, base=base)
    assert torch.equal(torch.get_rng_state(), position)
    torch.set_rng_state(before["random state"])
    assert_same(trial.snapshot() | trial.seed_snapshot(), before)


def test_loaded_network_file_with_an_incubating_seed_has_the_output_of_the_saved_network(
    tmp_path: Path,
) -> None:
    trial = planted(Case("conv_heavy", Style.LINEAR_ADD, "plain_images", 4))
    trial.train(2)
    plain = load(saved(trial, tmp_path), base=PlainImages(4))
    x, _ = batch(7)
    assert torch.equal(plain.eval()(x), trial.model.eval()(x))


# --- contents of a file ---------------------------------------------------------------------------


class Centred(nn.Module):
    """Network whose buffer is a view of the training data."""

    def __init__(self, data: Tensor) -> None:
        super().__init__()
        self.register_buffer("centre", data[0])
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x - self.centre))


def test_file_of_a_network_with_a_view_of_training_data_as_buffer_contains_only_the_view(
    tmp_path: Path,
) -> None:
    data = torch.randn(64, 6, generator=torch.Generator().manual_seed(3))
    net = Centred(data)
    model = MorphogeneticModel(net, sites=find_sites(net, "first", data))
    model.bind_optimiser(torch.optim.SGD(net.parameters(), lr=0.1))
    model.germinate(0, blueprint_named("mlp", "features").index, Style.LINEAR_ADD)
    model.train()(data).sum().backward()
    save(model.host, tmp_path / "centred.safetensors")
    content = (tmp_path / "centred.safetensors").read_bytes()
    assert data[0].numpy().tobytes() in content
    assert not any(row.numpy().tobytes() in content for row in data[1:])


def test_network_file_contains_no_features_stored_for_incubation(tmp_path: Path) -> None:
    trial = planted(Case("conv_light", 0, "images", 4))
    trial.train(1)
    features = trial.model.captured(SLOT)
    content = saved(trial, tmp_path).read_bytes()
    assert features[1].contiguous().numpy().tobytes() not in content
    # The incubating seed is left out.
    own = {name for name in trial.model.host.state_dict() if "esper_slot" not in name.split(".")}
    assert load_file(tmp_path / "deep" / "network.safetensors").keys() == own


# --- refusals ---------------------------------------------------------------------------------------


class Renamed(PlainImages):
    """Network of another class with the same tensors as ``PlainImages``."""


class Deeper(nn.Sequential):
    """Network whose depth is a constructor argument."""

    def __init__(self, depth: int, width: int = 6) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(6, width), nn.Linear(width, 6)) for _ in range(depth)))


def deeper_file(folder: Path) -> Path:
    net = Deeper(3)
    model = MorphogeneticModel(net, sites=find_sites(net, ["0", "1"], torch.randn(4, 6)))
    model.bind_optimiser(torch.optim.SGD(net.parameters(), lr=0.1))
    model.germinate(1, blueprint_named("mlp", "features").index, Style.LINEAR_ADD)
    save(model.host, folder / "deeper.safetensors")
    return folder / "deeper.safetensors"


@pytest.mark.parametrize(
    ("base", "sentence"),
    [
        (Renamed(4), "holds a PlainImages, and base is a Renamed$"),
        (BatchHost(4), "holds a PlainImages, and base is a BatchHost$"),
        (PlainImages(8), r"does not fit this PlainImages: \S+ has shape .*$"),
    ],
)
def test_load_refuses_a_network_of_another_class_or_width_as_base_and_leaves_it_unchanged(
    base: nn.Module, sentence: str, tmp_path: Path
) -> None:
    path = saved(grown(), tmp_path)
    assert_refused(path, base, rf"^'{path}' {sentence}")


@pytest.mark.parametrize(
    ("base", "sentence"),
    [
        # With depth 1, ``base`` lacks the submodule of the second slot.
        (Deeper(1), "does not fit this Deeper: .*1.*"),
        (Deeper(2), r"does not fit this Deeper: it has no 2\.0\.bias"),
        (Deeper(4), r"does not fit this Deeper: the file has no 3\.0\.bias"),
        (
            Deeper(3, width=5),
            r"does not fit this Deeper: 0\.0\.bias has shape \(6,\) in the file and \(5,\) in base",
        ),
    ],
    ids=["depth 1", "depth 2", "depth 4", "width 5"],
)
def test_load_refuses_a_network_of_another_depth_or_width_as_base_and_leaves_it_unchanged(
    base: nn.Module, sentence: str, tmp_path: Path
) -> None:
    path = deeper_file(tmp_path)
    assert_refused(path, base, rf"^'{path}' {sentence}$")


def assert_refused(path: Path, base: nn.Module, sentence: str) -> None:
    before, modules = tensors_of(base), [name for name, _ in base.named_modules()]
    with pytest.raises(HostError, match=sentence) as raised:
        load(path, base=base)
    assert "\n" not in str(raised.value)
    assert_same(tensors_of(base), before)
    assert [name for name, _ in base.named_modules()] == modules
    assert not any(module._forward_hooks for module in base.modules())


def test_load_refuses_a_network_that_has_slots_as_base_and_leaves_it_unchanged(tmp_path: Path) -> None:
    path, other = saved(grown(), tmp_path), grown()
    before = other.snapshot() | other.seed_snapshot()
    with pytest.raises(HostError, match="this PlainImages is growing already"):
        load(path, base=other.model.host)
    assert_same(other.snapshot() | other.seed_snapshot(), before)


def test_load_refuses_the_file_of_a_users_network_without_argument_base(tmp_path: Path) -> None:
    path = saved(grown(), tmp_path)
    sentence = f"^'{path}' holds a PlainImages, which is no built-in host; pass base=, a new PlainImages$"
    with pytest.raises(HostError, match=sentence):
        load(path)


def test_network_file_with_a_users_blueprint_is_loaded_only_if_the_blueprint_is_registered(
    tmp_path: Path,
) -> None:
    x, _ = batch(7)
    with registered("mine", DropoutSeed):
        trial = grown(blueprint="mine")
        path = saved(trial, tmp_path)
        assert torch.equal(load(path, base=PlainImages(4)).eval()(x), trial.model.eval()(x))
    base = PlainImages(4)
    before = tensors_of(base)
    with pytest.raises(UnknownNameError, match="unknown blueprint for feature_map hosts 'mine'"):
        load(path, base=base)
    assert_same(tensors_of(base), before)
    assert not slots_of(base)


EMPTY = {"digest": "0" * 64, "format": 1, "class": "PlainImages", "edits": [], "spec": None, "tied": {}}


def sealed(header: Any, tensors: dict[str, Tensor] | None = None) -> bytes:
    """Return a safetensors file with a header that has the right digest."""
    content = save_tensors(tensors or {}, metadata={"esper": json.dumps(header)})
    return content.replace(b"0" * 64, hashlib.sha256(content).hexdigest().encode(), 1)


FOREIGN: dict[str, Any] = {
    "empty file": b"",
    "text": b"epoch,loss\n1,0.5\n",
    "pickle of code": pickle.dumps(print),
    "file of torch.save": {"sites": [], "state": {}, "class": "PlainImages", "spec": None},
    "state dict": save_tensors(PlainImages(4).state_dict()),
    "digest in a text": b"digest " + b"0" * 64,
    "header is a list": sealed(["0" * 64]),
    "header without edits": sealed({"digest": "0" * 64, "format": 1, "class": "PlainImages"}),
    "edits are a number": sealed(EMPTY | {"edits": 5}),
    "edit without site": sealed(EMPTY | {"edits": [[{"seed": ["lora", "linear_add", None]}]]}),
    "unknown tied tensor": sealed(EMPTY | {"tied": {"head.weight": "other"}}),
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_load_refuses_a_file_that_esper_did_not_write_and_leaves_base_unchanged(
    content: Any, tmp_path: Path
) -> None:
    path = tmp_path / "foreign.safetensors"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    assert_refused_as_foreign(path)


def assert_refused_as_foreign(path: Path) -> None:
    base = PlainImages(4)
    before = tensors_of(base)
    sentence = (
        rf"^'{path}' is no network that this version of Esper saved, or is damaged \(\w+\); pass a file"
        " that Grown.save or Growth.save wrote$"
    )
    with pytest.raises(EsperError, match=sentence):
        load(path, base=base)
    assert_same(tensors_of(base), before)
    assert not slots_of(base)


def test_missing_and_truncated_network_files_are_refused(tmp_path: Path) -> None:
    path = saved(grown(), tmp_path)
    path.write_bytes(path.read_bytes()[:-500])
    for wrong in (path, tmp_path, tmp_path / "nothing.safetensors"):
        assert_refused_as_foreign(wrong)


def test_network_file_with_any_changed_byte_is_refused(tmp_path: Path) -> None:
    path = saved(grown(), tmp_path)
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for at in (*range(0, header, 7), *range(header, len(content), 131), len(content) - 1):
        for flipped in (1, 0x20, 0xFF):
            path.write_bytes(content[:at] + bytes([content[at] ^ flipped]) + content[at + 1 :])
            with pytest.raises(EsperError, match="is no network that this version of Esper saved"):
                load(path, base=PlainImages(4))
    path.write_bytes(content)
    load(path, base=PlainImages(4))


def test_network_file_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "newer.safetensors"
    path.write_bytes(sealed(EMPTY | {"format": 2}))
    sentence = (
        f"^'{path}' has format 2, and this version of Esper reads format 1; read it with the version that"
    )
    with pytest.raises(EsperError, match=sentence):
        load(path, base=PlainImages(4))
