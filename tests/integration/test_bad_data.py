"""Unusable data sets and blueprints end a command with a one-sentence error and exit code 2.

The readers of data files are tested in tests/tolaria/readers.
"""

from pathlib import Path

import pytest
from torch import nn

from tests.contracts.matrix import registered
from tests.integration.training import Refused
from tests.tolaria.readers.building import idx_bytes, image_bytes, mnist_like, random_bytes, write_files

Files = dict[str, bytes]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder, the only one in which Esper searches for data sets."""
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setenv("ESPER_DATA", str(folder))
    monkeypatch.setenv("XDG_DATA_DIRS", str(tmp_path / "nothing"))
    return folder


def idx(side: int = 28) -> Files:
    """Return the contents of small files in the format of Fashion-MNIST, by path."""
    arrays = mnist_like(train=8, test=8, height=side, width=side)
    return {f"fashion-mnist/{name}": idx_bytes(values) for name, values in arrays.items()}


def folders() -> Files:
    """Return the contents of CIFAR-10 image files by path, with one image per class and split."""
    image = image_bytes(random_bytes(32, 32, 3), "PNG")
    return {f"cifar-10/{split}/{name}/1": image for split in ("train", "test") for name in "abcdefghij"}


@pytest.mark.parametrize(
    ("task", "files", "sentence"),
    [
        (
            "fashion14_impaired",
            idx(side=20),
            "images of shape (1, 10, 10); the task needs (1, 14, 14): put the right data set there",
        ),
        ("fashion14_impaired", idx(), "has 8 images to train on and validate with; the task needs 5120"),
        (
            "cifar_impaired",
            {"cifar-10/data_batch_1.bin": bytes(3073 * 7 + 5)},
            "holds 21516 bytes; a binary batch of CIFAR-10 has 10000 × 3073 = 30730000: copy or download it",
        ),
        ("cifar_impaired", folders(), "has 10 images to train on and validate with; the task needs 5120"),
        ("text", {"text.txt": b"to be " * 4181}, "a text of 25086 bytes is too short"),
        ("text", {"text.txt": b"a" * 30000}, "answers to train on are 97, so there is nothing to learn"),
    ],
)
def test_run_on_unusable_data_files_ends_with_a_one_sentence_error(
    task: str, files: Files, sentence: str, data: Path, tmp_path: Path, refused: Refused
) -> None:
    write_files(data, files)
    assert sentence in refused("run", "--task", task, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists(), "nothing may be written for a command that cannot run"


@pytest.mark.parametrize(
    ("command", "task", "name"),
    [("run", "fashion14", "fashion-mnist"), ("train", "cifar", "cifar-10"), ("run", "text", "text.txt")],
)
def test_run_or_training_without_its_data_set_ends_with_a_one_sentence_error(
    command: str, task: str, name: str, data: Path, tmp_path: Path, refused: Refused
) -> None:
    said = refused(command, "--task", task, "--out", tmp_path / "run")
    assert f"the data set {name} is missing; looked at '{data}/{name}', " in said


def test_run_ends_with_a_one_sentence_error_if_a_blueprint_changes_the_feature_shape(
    tmp_path: Path, refused: Refused
) -> None:
    words = ("run", "--rotation", "odd", "--steps", "9", "--json", "--out", tmp_path / "run")
    with registered("odd", lambda width: nn.Conv2d(width, width, 3)):
        assert "blueprint 'odd' must keep the shape of its input" in refused(*words)
