"""Data and blueprints that cannot be used, as the command line answers them: one sentence, exit code 2."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from esper.scripts import cli
from tests.contracts.matrix import registered
from tests.contracts.test_refusals import Narrow, Undefined
from tests.tolaria.readers.building import idx_bytes, image_bytes, mnist_like, random_bytes, write_files

USAGE_ERROR = 2
NOBODY = 65534
LABELS = "train-labels-idx1-ubyte"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of one's own data sets; the machine's are out of sight."""
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setenv("ESPER_DATA", str(folder))
    monkeypatch.setenv("XDG_DATA_DIRS", str(tmp_path / "nothing"))
    return folder


def refused(capsys: pytest.CaptureFixture[str], out: Path, *words: str) -> str:
    """The one line that the command says before it exits with code 2."""
    with pytest.raises(SystemExit) as stop:
        cli.main([*words, "--out", str(out)])
    said = capsys.readouterr()
    assert stop.value.code == USAGE_ERROR
    assert said.err.startswith("esper: ")
    assert said.err.count("\n") == 1
    assert "Traceback" not in said.out + said.err
    return said.err


def colours(side: int = 32) -> bytes:
    return image_bytes(random_bytes(side, side, 3), "PNG")


def folders(classes: int = 10, **odd: bytes) -> dict[str, bytes]:
    """One image for each class of both splits; ``odd`` replaces that of a class in the training split."""
    names = "abcdefghijklm"[:classes]
    whole = {f"{split}/{name}/1": colours() for split in ("train", "test") for name in names}
    return whole | {f"train/{name}/1": content for name, content in odd.items()}


# --- what is wrong with the files -----------------------------------------------------------------

Files = dict[str, bytes]


def idx(side: int = 28) -> Files:
    """Small files of Fashion-MNIST."""
    arrays = mnist_like(train=8, test=8, height=side, width=side)
    return {name: idx_bytes(values) for name, values in arrays.items()}


FASHION: dict[str, tuple[Files, str]] = {
    "one file missing": (
        {name: content for name, content in idx().items() if name != LABELS},
        f"holds neither {LABELS} nor {LABELS}.gz; one of them is needed: put it there",
    ),
    "shape: another size": (
        idx(side=20),
        "images of shape (1, 10, 10); the task needs (1, 14, 14): put the right data set there",
    ),
    "too few images": (idx(), "has 8 images to train on and validate with; the task needs 5120"),
}
CIFAR: dict[str, tuple[Files, str]] = {
    "truncated": (
        {"data_batch_1.bin": bytes(3073 * 7 + 5)},
        "holds 21516 bytes; a binary batch of CIFAR-10 has 10000 × 3073 = 30730000: copy or download it",
    ),
    "labels out of range": (
        folders(11),
        "has 11 class folders (a, b, c, d, e, f, g, h, i, j, k); 10 are needed: add what is missing, or take",
    ),
    "dtype": (
        folders(b=image_bytes(np.full((32, 32), 70000, dtype=np.int32), "PNG", mode="I;16")),
        "/train/b/1' has pixels of Pillow's mode I;16; 8 bits per channel are allowed: convert it",
    ),
    "too few images": (folders(), "has 10 images to train on and validate with; the task needs 5120"),
}
TEXT: dict[str, tuple[Files, str]] = {
    "empty": ({"text.txt": b""}, "is empty; a text file in UTF-8 with at least one character is expected"),
    "shorter than its splits": ({"text.txt": b"to be " * 4181}, "a text of 25086 bytes is too short"),
    "dtype": ({"text.txt": b"caf\xe9 " * 9000}, "cannot be decoded at offset 3 (byte 0xe9"),
    "one byte only": ({"text.txt": b"a" * 30000}, "answers to train on are 97, so there is nothing to learn"),
}
CASES = {
    f"{task}: {what}": (task, {f"{place}{name}": content for name, content in files.items()}, sentence)
    for task, place, cases in (
        ("fashion14_impaired", "fashion-mnist/", FASHION),
        ("cifar_impaired", "cifar-10/", CIFAR),
        ("text", "", TEXT),
    )
    for what, (files, sentence) in cases.items()
}


@pytest.mark.parametrize("case", CASES)
def test_files_that_cannot_be_used_get_a_sentence(
    case: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task, files, sentence = CASES[case]
    write_files(data, files)
    assert sentence in refused(capsys, tmp_path / "run", "run", "--task", task)
    assert not (tmp_path / "run").exists(), "nothing may be written for a command that cannot run"


@pytest.mark.parametrize("command", ["run", "train"])
@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        ("fashion14", "the data set fashion-mnist is missing; looked at '{data}/fashion-mnist', "),
        ("cifar", "the data set cifar-10 is missing; looked at '{data}/cifar-10', "),
        ("text", "the data set text.txt is missing; looked at '{data}/text.txt', "),
    ],
)
def test_a_missing_data_set_gets_a_sentence(
    command: str, task: str, sentence: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, tmp_path / "run", command, "--task", task)
    assert sentence.format(data=data) in said


# --- what may not be read -------------------------------------------------------------------------


@contextmanager
def without_privileges() -> Iterator[None]:
    """As a user to whom something can be denied: root becomes nobody for a while."""
    if os.geteuid() != 0:
        yield
        return
    try:
        os.seteuid(NOBODY)
    except OSError as error:
        pytest.skip(f"this process can become nobody else ({error.strerror})")
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A folder that everybody may enter; pytest's own are for its user alone."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.parametrize(
    ("task", "locked", "mode"),
    [
        ("fashion14_impaired", "fashion-mnist", 0o444),
        ("cifar_impaired", "cifar-10/train/a/1", 0o000),
        ("text", "", 0o000),
    ],
)
def test_data_without_permission_gets_a_sentence(
    task: str,
    locked: str,
    mode: int,
    open_place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = open_place / "data"
    monkeypatch.setenv("ESPER_DATA", str(data))
    monkeypatch.setenv("XDG_DATA_DIRS", str(tmp_path / "nothing"))
    refused(capsys, tmp_path / "run", "run", "--task", task)  # every module is imported while we may read it
    write_files(data / "fashion-mnist", idx())
    write_files(data / "cifar-10", folders())
    write_files(data, {"text.txt": b"to be "})
    kept = (data / locked).stat().st_mode
    (data / locked).chmod(mode)
    try:
        with without_privileges():
            said = refused(capsys, tmp_path / "run", "run", "--task", task)
    finally:
        (data / locked).chmod(kept)
    assert "may not be read (permission denied)" in said
    assert f"'{data / locked}" in said
    assert "give this user the right to read it" in said


# --- blueprints of one's own ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (Narrow, "blueprint 'odd' must keep the shape of its input"),
        (Undefined, "blueprint 'odd' returned a non-finite delta at birth; look for a division by zero"),
    ],
)
def test_a_blueprint_that_cannot_be_planted_ends_a_run_with_a_sentence(
    build: Callable[[int], nn.Module], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with registered("odd", build):
        said = refused(capsys, tmp_path / "run", "run", "--rotation", "odd", "--steps", "9", "--json")
    assert sentence in said
