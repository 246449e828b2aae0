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
    """Images of one pixel that hold their own number, which is also the label."""
    numbers = torch.arange(count)
    return numbers.float().reshape(count, 1, 1, 1), numbers


def test_the_digits_are_split_into_1077_360_and_360() -> None:
    splits = load_digits(generator())
    assert (len(splits.train), len(splits.validation), len(read_test(splits))) == (1077, 360, 360)
    assert splits.train.x.shape == (1077, 1, 8, 8)
    assert splits.train.x.is_contiguous(memory_format=torch.channels_last)
    assert sorted(set(splits.train.y.tolist())) == list(range(10))


def test_every_sample_is_in_exactly_one_part_and_keeps_its_label() -> None:
    splits = split_images(*numbered(50), validation=10, test=15, generator=generator())
    parts = (splits.train, splits.validation, read_test(splits))
    assert [len(part) for part in parts] == [25, 10, 15]
    assert sorted(chain.from_iterable(part.y.tolist() for part in parts)) == list(range(50))
    # The pixel is the label, so normalising the labels themselves gives the images back.
    chosen = splits.train.y.double()
    for part in parts:
        np.testing.assert_allclose(part.x.flatten(), (part.y - chosen.mean()) / chosen.std(), atol=1e-5)


def test_the_training_part_alone_sets_the_normalisation() -> None:
    images, labels = _load_arrays()
    splits = load_digits(generator())
    assert splits.train.x.mean().item() == pytest.approx(0.0, abs=1e-5)
    assert splits.train.x.std().item() == pytest.approx(1.0, abs=1e-4)
    # The same images once more, but with every image outside the training part a thousand times brighter.
    order = torch.randperm(len(images), generator=generator())
    bright = images.clone()
    bright[order[1077:]] *= 1000.0
    again = split_images(bright, labels, validation=360, test=360, generator=generator())
    assert torch.equal(again.train.x, splits.train.x)


def test_the_split_follows_its_generator_and_leaves_something_to_train_on() -> None:
    first, same, other = (load_digits(generator(seed)).train for seed in (0, 0, 1))
    assert torch.equal(first.x, same.x)
    assert not torch.equal(first.y, other.y)
    with pytest.raises(DataError, match=r"20 samples cannot give 10 for validation and 10 for test"):
        split_images(*numbered(20), validation=10, test=10, generator=generator())


def answering(*answers: int) -> Splits:
    """Data whose training part has these answers, in two rows."""
    y = torch.tensor(answers).view(2, -1)
    samples = Samples(torch.zeros(len(y), 1), y)
    return Splits(samples, samples, GuardedTest(samples))


def test_a_blind_guess_knows_how_often_each_answer_comes() -> None:
    assert answering(0, 1, 2, 3).guess_loss() == pytest.approx(math.log(4))
    # Half, a quarter, a quarter: ln 2 / 2 + 2·ln 4 / 4; classes that never come do not count.
    assert answering(9, 9, 0, 3).guess_loss() == pytest.approx(1.5 * math.log(2))
    with pytest.raises(
        DataError, match=r"all 4 answers to train on are 7, so there is nothing to learn; two"
    ):
        answering(7, 7, 7, 7).guess_loss()


def test_every_minibatch_has_the_same_size_for_ever() -> None:
    cursor = BatchCursor(10, 4, generator())
    batches = [cursor.next().tolist() for _ in range(50)]
    assert all(len(set(batch)) == 4 for batch in batches)
    # Ten samples give two batches and two leftovers, then a new order: no sample twice within a sweep.
    for sweep in zip(batches[0::2], batches[1::2], strict=True):
        assert len(set(chain.from_iterable(sweep))) == 8
    assert set(chain.from_iterable(batches)) == set(range(10)), "leftovers come back in later sweeps"
    assert batches[0:2] != batches[2:4]
    for size in (0, 11):
        with pytest.raises(DataError, match=rf"batch size \(={size}\) must be between 1 and the 10"):
            BatchCursor(10, size, generator())
