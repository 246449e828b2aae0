"""Tasks whose data come from files or from the source code of the Python standard library."""

from pathlib import Path

import numpy as np
import pytest
import torch

from esper.leyline.errors import DataError
from esper.tolaria.batches import shifted_and_flipped
from esper.tolaria.data import digest_of
from esper.tolaria.tasks import images
from esper.tolaria.tasks.images import CIFAR_IMPAIRED, FASHION14_IMPAIRED
from esper.tolaria.tasks.text import BLOCK, CONTEXT, PYCODE, TEXT, split_text
from tests.tolaria.building import bits, host_bits, run, started, tiny_task
from tests.tolaria.readers.building import (
    CIFAR_NAMES,
    IDX_NAMES,
    idx_bytes,
    mnist_like,
    random_bytes,
    write_mnist_like,
)


def generator(rng_seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(rng_seed)


def write_fashion(folder: Path, train: int = 5200, *, packed: bool) -> None:
    write_mnist_like(folder, mnist_like(train, test=1100, height=28, width=28), packed=packed)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ESPER_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_DIRS", str(tmp_path / "nothing"))
    return tmp_path


# --- Fashion-MNIST ---------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_task_fashion14_draws_images_of_half_the_resolution_with_the_given_generator(
    data: Path, packed: bool
) -> None:
    write_fashion(data / "fashion-mnist", packed=packed)
    splits = FASHION14_IMPAIRED.load(generator())
    splits.test.unlock()
    parts = (splits.train, splits.validation, splits.test.read())
    assert [len(part) for part in parts] == [4096, 1024, 1024]
    assert all(part.x.shape[1:] == (1, 14, 14) for part in parts)
    assert splits.train.x.mean().item() == pytest.approx(0, abs=1e-4)
    assert splits.train.x.std().item() == pytest.approx(1, abs=1e-3)
    assert not torch.equal(FASHION14_IMPAIRED.load(generator(1)).train.y, splits.train.y)
    assert torch.equal(FASHION14_IMPAIRED.load(generator()).train.x, splits.train.x)


def test_fashion14_draws_its_test_split_from_the_test_files_and_changed_files_change_its_digest(
    data: Path,
) -> None:
    def digest() -> str:
        images._read_idx.cache_clear()
        images._pooled.cache_clear()
        return digest_of(*(tensor for part in images.fashion14() for tensor in part))

    write_fashion(data / "fashion-mnist", packed=False)
    first = digest()
    labels = np.full(1100, 7, dtype=np.uint8)
    (data / "fashion-mnist" / IDX_NAMES[3]).write_bytes(idx_bytes(labels))
    assert digest() != first
    splits = FASHION14_IMPAIRED.load(generator())
    splits.test.unlock()
    assert set(splits.test.read().y.tolist()) == {7}
    assert len(set(splits.train.y.tolist())) == 10


def test_task_cifar_reads_binary_batches_with_matching_labels(data: Path) -> None:
    labels = random_bytes(10_000, below=10)
    table = np.zeros((10_000, 3073), dtype=np.uint8)
    # All red pixels of an image have the value of its label.
    table[:, 0], table[:, 1:1025] = labels, labels[:, None]
    (data / "cifar-10").mkdir()
    for name in CIFAR_NAMES:
        table.tofile(data / "cifar-10" / name)
    splits = CIFAR_IMPAIRED.load(generator())
    for path in (data / "cifar-10").iterdir():
        path.unlink()  # The CIFAR files take 180 megabytes, so the test deletes them.
    assert (len(splits.train), len(splits.validation)) == (4096, 1024)
    assert splits.train.x.shape[1:] == (3, 32, 32)
    red = splits.validation.x[:, 0, 0, 0]
    by_label = [red[splits.validation.y == label].unique() for label in range(10)]
    assert all(len(values) == 1 for values in by_label), "every image has its own label"
    assert torch.cat(by_label).diff().min() > 0.0


# --- augmentation ----------------------------------------------------------------------------------


def test_augmentation_of_images_does_not_change_other_random_draws() -> None:
    (plain, _), (moved, _), (again, _) = (started(tiny_task(augment=a)) for a in (False, True, True))
    before = moved.host._augmenting.get_state()
    for env in (plain, moved, again):
        run(env, {}, until=3)
    assert not torch.equal(moved.host._augmenting.get_state(), before)
    assert bits(plain.host._cursor._order) == bits(moved.host._cursor._order), (
        "the same images in the same order"
    )
    assert torch.equal(plain.host._host_stream.get_state(), moved.host._host_stream.get_state())
    assert host_bits(plain) != host_bits(moved), "but the images were shifted"
    assert host_bits(moved) == host_bits(again)


def test_augmentation_shifts_images_by_up_to_an_eighth_and_mirrors_them_reproducibly() -> None:
    picture = torch.arange(1, 17 * 16 + 1, dtype=torch.float32)[: 16 * 16].view(1, 1, 16, 16)
    moved = shifted_and_flipped(picture.expand(400, 1, 16, 16), generator())
    assert moved.shape == (400, 1, 16, 16)
    padded = torch.nn.functional.pad(picture, (2,) * 4)[0, 0]
    views = [padded[down : down + 16, right : right + 16] for down in range(5) for right in range(5)]
    views += [view.flip(1) for view in views]
    assert {bits(image[0]) for image in moved} == {bits(view) for view in views}
    again = shifted_and_flipped(picture.expand(400, 1, 16, 16), generator())
    assert torch.equal(moved, again)


# --- text ------------------------------------------------------------------------------------------


def test_targets_of_the_task_pycode_are_the_bytes_after_the_inputs() -> None:
    splits = PYCODE.load(generator())
    assert splits.train.x.shape[1] == CONTEXT
    assert torch.equal(splits.train.x[:, 1:], splits.train.y[:, :-1])
    assert int(splits.train.x.max()) < 256
    assert len(splits.validation) == 256
    assert len(PYCODE.digest()) == 64
    assert 2 < splits.guess_loss() < 4, "entropy of the byte frequencies in nats"


def test_token_windows_of_one_block_of_text_are_in_the_same_split() -> None:
    assert len(split_text(b"x" * 25_089, CONTEXT, generator()).train) == BLOCK, (
        "the shortest text that is accepted"
    )
    content = bytes(range(256)) * 4000
    numbers = torch.arange(len(content) // CONTEXT)
    splits = split_text(content, CONTEXT, generator())
    splits.test.unlock()
    parts = (splits.train, splits.validation, splits.test.read())
    assert sum(map(len, parts)) <= len(numbers)
    for part in parts:
        blocks = part.x.unflatten(0, (-1, BLOCK))
        follows = (blocks[:, 1:, 0] - blocks[:, :-1, 0]) % 256 == CONTEXT
        assert follows.all(), "windows of a block are consecutive"


def test_task_text_reads_the_users_file_and_refuses_a_missing_file(data: Path) -> None:
    with pytest.raises(DataError, match=r"the data set text\.txt is missing"):
        TEXT.load(generator())
    (data / "text.txt").write_text("to be or not to be, that is the question\n" * 2000)
    splits = TEXT.load(generator())
    assert bytes(splits.train.x[0].tolist()).decode() in "to be or not to be, that is the question\n" * 3
