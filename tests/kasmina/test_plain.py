from pathlib import Path

import pytest
import torch
from torch import nn

from esper.kasmina import harvest, load_committed, save_committed
from esper.leyline import Stage, Style
from esper.leyline.errors import EsperError, HostError, UnknownNameError
from tests.contracts.matrix import (
    SLOT,
    Case,
    Trial,
    assert_same,
    batch,
    begin,
    germinate,
    planted,
    registered,
)
from tests.kasmina.living import grow
from tests.kasmina.test_incubation import Dropping


def grown(style: int = Style.GATED_GATE, blueprint: str = "conv_heavy") -> Trial:
    """A committed network with one fossil."""
    trial = begin("images", 8)
    trial.model.rules = begin("images", 8, training_epochs=1).model.rules
    grow(trial, SLOT, blueprint, style, *batch(0))
    return trial


def test_a_harvest_is_a_chain_of_segments_and_fossils_alone() -> None:
    trial = grown()
    x, _ = batch(7)
    wanted = trial.model.eval()(x)
    germinate(trial.model, "conv_light", Style.LINEAR_ADD, slot=1)
    plain = harvest(trial.model)
    assert type(plain) is nn.Sequential
    assert torch.equal(plain.eval()(x), wanted), "a seed that is no fossil is left behind"
    names = ["segment_0", "fossil_r0c0", "segment_1", "segment_2"]
    assert [name for name, _ in plain.named_children()] == names


def test_a_harvest_shares_nothing_with_the_model() -> None:
    trial = grown()
    before = trial.snapshot() | trial.seed_snapshot()
    with torch.no_grad():
        for weight in harvest(trial.model).parameters():
            weight.zero_()
    assert_same(trial.snapshot() | trial.seed_snapshot(), before)
    assert trial.model.table.stage[0, SLOT] == Stage.FOSSILIZED
    trial.train(1)


# --- on disk ------------------------------------------------------------------------------------------


def test_saving_and_loading_draw_nothing_and_change_nothing(tmp_path: Path) -> None:
    trial = grown()
    before = trial.snapshot()
    save_committed(trial.model, tmp_path)
    assert_same(trial.snapshot(), before)
    load_committed(tmp_path)
    assert torch.equal(torch.get_rng_state(), before["random state"])


def test_a_users_blueprint_is_loaded_where_it_is_registered(tmp_path: Path) -> None:
    with registered("mine", Dropping):
        trial = grown(Style.LINEAR_ADD, "mine")
        save_committed(trial.model, tmp_path)
        x, _ = batch(7)
        assert torch.equal(load_committed(tmp_path).eval()(x), trial.model.eval()(x))
    with pytest.raises(UnknownNameError, match="unknown blueprint for feature_map hosts 'mine'"):
        load_committed(tmp_path)


def test_a_directory_without_a_network_says_what_is_missing(tmp_path: Path) -> None:
    save_committed(grown().model, tmp_path)
    for missing in ("weights.safetensors", "topology.json"):
        (tmp_path / missing).unlink()
        with pytest.raises(EsperError, match=rf"'{tmp_path}' holds no saved network: {missing} is missing"):
            load_committed(tmp_path)


def test_a_host_of_the_users_own_is_theirs_to_save(tmp_path: Path) -> None:
    trial = planted(Case("norm", 0, "images_batch", 4))
    with pytest.raises(
        HostError,
        match=r"only built-in hosts can be rebuilt from a file; BatchHost is yours: use harvest\(model\)"
        r" and save its state_dict",
    ):
        save_committed(trial.model, tmp_path / "new")
    assert not (tmp_path / "new").exists()
