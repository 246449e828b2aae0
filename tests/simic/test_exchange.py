"""Shards among processes: each is run once, by whoever is free."""

import itertools

import pytest
from torch.distributed import HashStore

from esper.simic.training import exchange


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every claim of the test is one of the same work, as if made by another process."""
    monkeypatch.setattr(exchange, "_store", HashStore())
    monkeypatch.setattr(exchange, "_works", itertools.repeat(0))


def test_a_process_alone_runs_all_shards_in_order() -> None:
    assert list(exchange.claim(5)) == [0, 1, 2, 3, 4]


@pytest.mark.usefixtures("shared")
def test_a_process_that_is_busy_leaves_the_rest_to_the_other() -> None:
    slow, quick = exchange.claim(5), exchange.claim(5)
    assert next(slow) == 0
    assert list(quick) == [1, 2, 3, 4]
    assert list(slow) == []


def test_the_next_work_begins_with_its_first_shard_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_store", HashStore())
    assert list(exchange.claim(2)) == [0, 1]
    assert list(exchange.claim(3)) == [0, 1, 2]
