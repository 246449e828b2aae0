"""Splits of a data set, their normalisation, the loss of the best constant prediction, and the order of
minibatches."""

import math
from itertools import chain

import numpy as np
import pytest
import torch
from torch import Tensor

from esper.leyline.errors import DataError
from esper.tolaria.batches import BatchCursor
from esper.tolaria.data import GuardedTest, Samples, Splits, split_images
from esper.tolaria.tasks.digits import _load_arrays, load_digits


def generator(rng_seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(rng_seed)


def read_test(splits: Splits) -> Samples:
    splits.test.unlock()
    return splits.test.read()


def numbered(count: int) -> tuple[Tensor, Tensor]:
    """Return images of one pixel whose value is the label: 0, 1, 2, ..."""
    numbers = torch.arange(count)
    return numbers.float().reshape(count, 1, 1, 1), numbers


def test_digits_are_split_into_1077_training_360_validation_and_360_test_images() -> None:
    splits = load_digits(generator())
    assert (len(splits.train), len(splits.validation), len(read_test(splits))) == (1077, 360, 360)
    assert splits.train.x.shape == (1077, 1, 8, 8)
    assert splits.train.x.is_contiguous(memory_format=torch.channels_last)
    assert sorted(set(splits.train.y.tolist())) == list(range(10))


def test_every_image_is_in_exactly_one_split_with_its_label() -> None:
    splits = split_images(*numbered(50), validation=10, test=15, generator=generator())
    parts = (splits.train, splits.validation, read_test(splits))
    assert [len(part) for part in parts] == [25, 10, 15]
    assert sorted(chain.from_iterable(part.y.tolist() for part in parts)) == list(range(50))
    # The only pixel of an image has the value of the label, so normalised images equal normalised labels.
    chosen = splits.train.y.double()
    for part in parts:
        np.testing.assert_allclose(part.x.flatten(), (part.y - chosen.mean()) / chosen.std(), atol=1e-5)


def test_normalisation_of_images_depends_on_the_training_split_only() -> None:
    images, labels = _load_arrays()
    splits = load_digits(generator())
    assert splits.train.x.mean().item() == pytest.approx(0.0, abs=1e-5)
    assert splits.train.x.std().item() == pytest.approx(1.0, abs=1e-4)
    # The second data set has the same images, but images outside of the training split are a thousand times
    # brighter.
    order = torch.randperm(len(images), generator=generator())
    bright = images.clone()
    bright[order[1077:]] *= 1000.0
    again = split_images(bright, labels, validation=360, test=360, generator=generator())
    assert torch.equal(again.train.x, splits.train.x)


def test_split_of_the_data_depends_on_the_generator_and_an_empty_training_split_is_refused() -> None:
    first, same, other = (load_digits(generator(seed)).train for seed in (0, 0, 1))
    assert torch.equal(first.x, same.x)
    assert not torch.equal(first.y, other.y)
    with pytest.raises(DataError, match=r"20 samples cannot give 10 for validation and 10 for test"):
        split_images(*numbered(20), validation=10, test=10, generator=generator())


def with_targets(*answers: int) -> Splits:
    """Return splits whose training data has two samples with the given targets."""
    y = torch.tensor(answers).view(2, -1)
    samples = Samples(torch.zeros(len(y), 1), y)
    return Splits(samples, samples, GuardedTest(samples))


def test_loss_of_the_best_constant_prediction_is_the_entropy_of_the_training_targets() -> None:
    assert with_targets(0, 1, 2, 3).guess_loss() == pytest.approx(math.log(4))
    # Entropy of class frequencies 1/2, 1/4, 1/4: ln 2 / 2 + 2·ln 4 / 4; classes without samples add nothing.
    assert with_targets(9, 9, 0, 3).guess_loss() == pytest.approx(1.5 * math.log(2))
    with pytest.raises(
        DataError, match=r"all 4 answers to train on are 7, so there is nothing to learn; two"
    ):
        with_targets(7, 7, 7, 7).guess_loss()


def test_minibatches_have_a_fixed_size_and_no_sample_twice_between_reshuffles() -> None:
    cursor = BatchCursor(10, 4, generator())
    batches = [cursor.next().tolist() for _ in range(50)]
    assert all(len(set(batch)) == 4 for batch in batches)
    # Ten samples give two minibatches of four; the two remaining samples are dropped at the reshuffle.
    for sweep in zip(batches[0::2], batches[1::2], strict=True):
        assert len(set(chain.from_iterable(sweep))) == 8
    assert set(chain.from_iterable(batches)) == set(range(10)), (
        "dropped samples occur again after a reshuffle"
    )
    assert batches[0:2] != batches[2:4]
    for size in (0, 11):
        with pytest.raises(DataError, match=rf"batch size \(={size}\) must be between 1 and the 10"):
            BatchCursor(10, size, generator())
