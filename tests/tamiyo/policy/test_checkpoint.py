"""Policy checkpoints: save and load, atomic replacement, and errors for damaged files."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, save

from esper.files import atomic_write
from esper.files.atomic_write import SaveError, write_durably
from esper.leyline.errors import EsperError
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCritic
from esper.tamiyo.policy import checkpoint
from esper.tamiyo.policy.checkpoint import (
    POLICY_FILE,
    CheckpointError,
    TrainedOn,
    load_policy,
    read_json,
    save_policy,
)
from tests.integration.training import full_disk
from tests.tamiyo.policy.small_policies import policy_of
from tests.tolaria.building import bits


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_policy(policy_of(3), tmp_path / "policy")
    return tmp_path / "policy"


def weights(policy: FactoredRecurrentActorCritic) -> Any:
    return bits(policy.state_dict())


# --- save and load -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"context": True},
        {"critic": "op_value", "conditioned": False, "recurrent": False, "hold_heads": ("op",)},
    ],
)
def test_loaded_policy_equals_the_saved_policy_bit_for_bit(options: dict[str, Any], tmp_path: Path) -> None:
    policy = policy_of(4, **options)
    save_policy(policy, tmp_path / "a" / "policy")
    loaded = load_policy(tmp_path / "a" / "policy")
    assert loaded.shape == policy.shape
    assert weights(loaded) == weights(policy)


def test_equal_policies_are_equal_files(tmp_path: Path) -> None:
    """Several entries in the header would be written in random order."""
    for number in range(8):
        save_policy(policy_of(3), tmp_path / str(number), TrainedOn("tiny", 5, 20, 0.01, auto_forward=True))
    assert len({path.read_bytes() for path in tmp_path.rglob(POLICY_FILE)}) == 1


def test_load_policy_does_not_change_the_global_random_generator(saved: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    load_policy(saved)
    assert torch.equal(torch.rand(4), expected)


# --- replacement of a saved policy --------------------------------------------------------------------


class KilledError(BaseException):
    """Error that a test raises to simulate the end of the process."""


def stop_at_replacement(monkeypatch: pytest.MonkeyPatch, after: bool) -> None:
    """Raise ``KilledError`` before or after the rename of the file of a policy."""
    replace = os.replace

    def stopping(source: Path, target: Path) -> None:
        if after:
            replace(source, target)
        raise KilledError

    monkeypatch.setattr(os, "replace", stopping)


@pytest.mark.parametrize("after", [False, True])
def test_policy_is_loadable_after_a_kill_at_any_point_of_its_replacement(
    after: bool, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = policy_of(3), policy_of(3, rng_seed=1)
    with monkeypatch.context() as patch:
        stop_at_replacement(patch, after)
        with pytest.raises(KilledError):
            save_policy(new, saved)
    assert weights(load_policy(saved)) == weights(new if after else old)
    save_policy(new, saved)
    assert weights(load_policy(saved)) == weights(new)
    assert [path.name for path in saved.iterdir()] == [POLICY_FILE]


# --- errors of damaged or unfit checkpoints -----------------------------------------------------------


def test_checkpoint_error_reports_the_missing_file(saved: Path) -> None:
    (saved / POLICY_FILE).unlink()
    with pytest.raises(CheckpointError, match=f"holds no checkpoint: {POLICY_FILE} is missing"):
        load_policy(saved)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d["shape"].pop("recurrent"),
        lambda d: d["features"].__setitem__(5, "mood"),
        lambda d: d["trained_on"].update(slots=3),
    ],
)
def test_edited_description_of_a_policy_fails_the_digest_check(
    spoil: Callable[[dict[str, Any]], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "policy"
    save_policy(policy_of(3), saved, TrainedOn("tiny", 5, 20, 0.01, auto_forward=True))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_digest", lambda description, weights: written(saved)[0])
        spoilt(saved, spoil)
    with pytest.raises(CheckpointError, match="not as it was written"):
        load_policy(saved)


def test_policy_without_a_description_raises_checkpoint_error(saved: Path) -> None:
    (saved / POLICY_FILE).write_bytes(save(load((saved / POLICY_FILE).read_bytes())))
    with pytest.raises(CheckpointError, match="no policy of this version: its header has no description"):
        load_policy(saved)


def test_damaged_policy_file_raises_checkpoint_error_or_loads_unchanged_weights(saved: Path) -> None:
    good = load_policy(saved)
    file, rng = saved / POLICY_FILE, random.Random(0)
    content = file.read_bytes()
    header_size = 8 + int.from_bytes(content[:8], "little")
    refused = 0
    for number in range(60):
        # Every second damage is in the header, which is a small part of the file.
        place = rng.randrange(header_size if number % 2 else len(content))
        flipped = bytes([content[place] ^ 1 << rng.randrange(8)])
        tail = b"" if number % 5 == 0 else flipped + content[place + 1 :]
        file.write_bytes(content[:place] + tail)
        try:
            loaded = load_policy(saved)
        except EsperError:
            refused += 1
        else:
            assert (loaded.shape, weights(loaded)) == (good.shape, weights(good)), f"damaged at {place}"
    assert refused > 45


def test_error_for_a_policy_whose_features_differ_from_this_version_lists_the_different_features(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = checkpoint.feature_names

    def newer(num_slots: int, context: bool) -> tuple[str, ...]:
        return tuple("mood" if name == "plateau" else name for name in names(num_slots, context))

    monkeypatch.setattr(checkpoint, "feature_names", newer)
    with pytest.raises(CheckpointError, match="only in the policy: plateau; only in this version: mood;"):
        load_policy(saved)


def spoilt(saved: Path, spoil: Callable[[dict[str, Any]], object]) -> Path:
    """Change the description of a policy and update its digest, so that the digest check passes."""
    description = json.loads(written(saved)[1])
    spoil(description)
    return rewritten(saved, description, load((saved / POLICY_FILE).read_bytes()))


def rewritten(saved: Path, description: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    (saved / POLICY_FILE).write_bytes(checkpoint._encoded(json.dumps(description), tensors))
    return saved


def written(saved: Path) -> list[str]:
    """Return the digest and the description in the header of a policy's file."""
    with safe_open(saved / POLICY_FILE, "pt") as file:
        found: str = file.metadata()["policy"]
    return found.split(" ", 1)


def test_error_for_a_policy_file_with_a_renamed_feature_lists_both_names(saved: Path) -> None:
    renamed = spoilt(saved, lambda d: d["features"].__setitem__(d["features"].index("plateau"), "mood"))
    with pytest.raises(CheckpointError, match="only in the policy: mood; only in this version: plateau;"):
        load_policy(renamed)


def test_policy_with_the_same_features_in_another_order_raises_checkpoint_error(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="or on these in another order; only in the policy: none;"):
        load_policy(spoilt(saved, lambda d: d["features"].reverse()))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: d.pop("shape"), "does not describe a policy"),
        (lambda d: d.pop("features"), "does not describe a policy"),
        (lambda d: d.update(shape=3), "does not describe a policy"),
        (lambda d: d.update(features=7), "does not describe a policy"),
        (lambda d: d.update(features=[1, None]), "does not describe a policy"),
        (lambda d: d["shape"].update(num_slots="3"), "does not describe a policy"),
        (lambda d: d["shape"].update(num_slots=4), "trained on other features"),
        (lambda d: d["shape"].update(critic="q"), "does not describe a policy"),
        (
            lambda d: d["shape"].update(critic="op_value"),
            "do not fit its own description: value_head.0.weight",
        ),
        (lambda d: d["shape"].update(hidden_dim=10**9), "do not fit its own description: hidden_dim"),
        (lambda d: d["shape"].update(feature_dim=-4), "does not describe a policy"),
        (lambda d: d["shape"].update(hold_heads=["mood"]), "does not describe a policy"),
    ],
)
def test_invalid_policy_description_raises_an_error_of_one_line(
    spoil: Callable[[dict[str, Any]], object], message: str, saved: Path
) -> None:
    with pytest.raises(CheckpointError, match=message) as refusal:
        load_policy(spoilt(saved, spoil))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("norm.bias"), "norm.bias is nothing, expected float32"),
        (lambda t: t.update(extra=torch.zeros(2)), r"extra is float32 \[2\], expected nothing"),
        (lambda t: t.update({"norm.bias": torch.zeros(3)}), r"norm.bias is float32 \[3\]"),
        (lambda t: t.update({"norm.bias": t["norm.bias"].double()}), "norm.bias is float64"),
        (lambda t: t.clear(), "do not fit"),
    ],
)
def test_checkpoint_error_reports_the_first_tensor_that_does_not_fit(
    change: Callable[[dict[str, torch.Tensor]], object], message: str, saved: Path
) -> None:
    tensors = load((saved / POLICY_FILE).read_bytes())
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        load_policy(rewritten(saved, json.loads(written(saved)[1]), tensors))


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b'{"a": \xff}', b"[" * 100_000])
def test_invalid_json_in_a_checkpoint_file_raises_checkpoint_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"file\.json"):
        read_json(tmp_path / "file.json")


def test_unreadable_checkpoint_file_raises_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        read_json(tmp_path)


# --- atomic writes --------------------------------------------------------------------------------


def test_failed_durable_write_keeps_the_old_file_and_leaves_no_partial_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    write_durably(file, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(SaveError, match="file' cannot be written: No space left on device"):
            write_durably(file, b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert file.read_bytes() == b"old"
    write_durably(file, b"new")
    assert file.read_bytes() == b"new"


def test_durable_write_goes_through_no_link_in_place_of_file_or_partial_file(tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "folder"
    victim.write_bytes(b"thesis")
    folder.mkdir()
    for name in ("file", "file.partial"):
        (folder / name).symlink_to(victim)
    write_durably(folder / "file", b"new")
    assert victim.read_bytes() == b"thesis"
    assert not (folder / "file").is_symlink()


def test_durable_write_refuses_a_link_that_was_planted_at_its_partial_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, partial = tmp_path / "victim", tmp_path / "guessed"
    victim.write_bytes(b"thesis")
    partial.symlink_to(victim)
    monkeypatch.setattr(atomic_write, "partial_of", lambda path: partial)
    with pytest.raises(SaveError, match="File exists"):
        write_durably(tmp_path / "file", b"new")
    assert victim.read_bytes() == b"thesis"
