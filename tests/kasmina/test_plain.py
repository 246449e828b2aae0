"""Harvest: copies of grown networks as plain modules."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from esper.kasmina import harvest
from esper.kasmina.slot import slots_of
from esper.leyline import Stage, Style
from tests.contracts.hosts import Kind
from tests.contracts.matrix import SLOT, Trial, assert_same, batch, begin, germinate, registered
from tests.kasmina.seed_episodes import DropoutSeed, grow


def grown(
    style: int = Style.GATED_GATE, blueprint: str = "conv_heavy", kind: Kind = "images", width: int = 8
) -> Trial:
    """Return a network with one fossil."""
    trial = begin(kind, width, training_epochs=1)
    grow(trial, SLOT, blueprint, style, *batch(0))
    return trial


@pytest.mark.parametrize("kind", ["images", "images_batch", "plain_images"])
def test_harvested_module_has_the_class_of_the_host_and_contains_fossils_but_no_live_seeds(
    kind: Kind,
) -> None:
    trial = grown(kind=kind)
    x, _ = batch(7)
    wanted = trial.model.eval()(x)
    germinate(trial.model, "conv_light", Style.LINEAR_ADD, slot=1)
    plain = harvest(trial.model)
    assert type(plain) is type(trial.model.host)
    assert not slots_of(plain)
    assert [name for name, _ in plain.named_modules() if name.endswith("grown")] == [
        f"{trial.model.sites[SLOT].path}.grown"
    ]
    assert torch.equal(plain.eval()(x), wanted)


def test_dropout_of_a_harvested_fossil_is_active_in_train_mode() -> None:
    with registered("dropping", DropoutSeed):
        trial = grown(Style.LINEAR_ADD, "dropping")
        plain = harvest(trial.model)
    x, _ = batch(7)
    assert torch.equal(plain.eval()(x), trial.model.eval()(x))
    for module in plain.modules():
        if isinstance(module, nn.Dropout) and module.p < 0.5:
            # The test disables the host's dropout, so that only the fossil's dropout is random.
            module.p = 0.0
    plain.train()
    assert not torch.equal(plain(x), plain(x))


def test_harvested_module_shares_no_tensor_with_the_network() -> None:
    trial = grown()
    before = trial.snapshot() | trial.seed_snapshot()
    with torch.no_grad():
        for weight in harvest(trial.model).parameters():
            weight.zero_()
    assert_same(trial.snapshot() | trial.seed_snapshot(), before)
    assert trial.model.table.stage[0, SLOT] == Stage.FOSSILIZED
    trial.train(1)


def test_harvested_sequential_of_a_users_network_is_unpickled_without_esper(tmp_path: Path) -> None:
    trial = grown(kind="plain_images")
    x, _ = batch(7)
    # Only a Sequential of the harvested network is pickled, because unpickling it needs no user code.
    plain = nn.Sequential(*copy.deepcopy(harvest(trial.model)).first)
    torch.save((x, plain.eval()(x)), tmp_path / "wanted.pt")
    (tmp_path / "net.pickle").write_bytes(pickle.dumps(plain))
    code = (
        "import pickle, sys, torch; sys.modules['esper'] = None;"
        f"net = pickle.load(open({str(tmp_path / 'net.pickle')!r}, 'rb'));"
        f"x, wanted = torch.load({str(tmp_path / 'wanted.pt')!r});"
        "assert torch.equal(net(x), wanted)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
