"""Shards among processes: each is run once, by whoever is free; and how processes meet."""

import itertools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from esper.simic.training import exchange
from esper.simic.training.handshake import HandshakeError, agree_on_group


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


# --- meeting --------------------------------------------------------------------------------------

Arrive = Callable[..., "Future[str]"]


@pytest.fixture
def store() -> HashStore:
    store = HashStore()
    store.set_timeout(timedelta(seconds=60))
    return store


@pytest.fixture
def arrive(store: HashStore) -> Arrive:
    """Lets one of three processes, here a thread, come to the meeting; what it is told is to come."""
    pool = ThreadPoolExecutor(4)
    return lambda rank, seconds=60.0, **common: pool.submit(agree_on_group, store, rank, 3, common, seconds)


def test_a_group_has_one_name_that_no_earlier_one_had(arrive: Arrive) -> None:
    """The store is the same; the second and third find the nonces that the others left before them."""
    groups: list[set[str]] = []
    for _ in range(2):
        told = [arrive(rank, task="digits") for rank in (0, 2, 1)]
        groups.append({future.result() for future in told})
    assert [len(group) for group in groups] == [1, 1]
    assert groups[0].isdisjoint(groups[1])


def test_one_that_died_on_its_way_is_not_taken_for_the_one_that_comes(
    arrive: Arrive, store: HashStore
) -> None:
    store.set("nonce/1", "of one that was killed before it was answered")
    first, third = arrive(0), arrive(2)
    store.wait(["group/of one that was killed before it was answered"])
    assert not first.done()
    second = arrive(1)
    assert first.result() == second.result() == third.result()


def test_differences_are_named_with_both_values_and_their_rank(arrive: Arrive) -> None:
    told = [
        arrive(0, envs=4, torch="2.13.0", slots=None),
        arrive(1, envs=4, torch="2.12.1", slots=None),
        arrive(2, envs=8, torch="2.13.0", slots=None),
    ]
    for future in told:
        with pytest.raises(HandshakeError) as refusal:
            future.result()
        said = str(refusal.value)
        assert said.startswith("all ranks need the same settings and versions; torch is 2.13.0 on rank 0 and")
        assert "torch is 2.13.0 on rank 0 and 2.12.1 on rank 1 (" in said
        assert "; envs is 4 on rank 0 and 8 on rank 2 (" in said
        assert "slots" not in said


def test_the_first_does_not_wait_for_ever_and_tells_those_who_came(arrive: Arrive) -> None:
    for future in (arrive(2), arrive(0, seconds=0.2)):
        with pytest.raises(HandshakeError, match=r"^rank 1 of 3 did not come within 0.2 s; start all again$"):
            future.result()
