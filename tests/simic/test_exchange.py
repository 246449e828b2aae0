"""Assignment of shards of environments to processes, and the handshake of the processes."""

import itertools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from esper.simic.config import TrainingConfig
from esper.simic.training import exchange
from esper.simic.training.exchange import HandshakeError, agree_on_group
from esper.simic.training.trainer import Trainer, parts_of
from tests.tolaria.building import tiny_task


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all calls of ``claim`` share one counter of shards, like calls in several processes."""
    monkeypatch.setattr(exchange, "_store", HashStore())
    monkeypatch.setattr(exchange, "_works", itertools.repeat(0))


def test_single_process_claims_all_shards_of_environments_in_order() -> None:
    assert list(exchange.claim(5)) == [0, 1, 2, 3, 4]


@pytest.mark.usefixtures("shared")
def test_faster_process_claims_the_remaining_shards() -> None:
    slow, quick = exchange.claim(5), exchange.claim(5)
    assert next(slow) == 0
    assert list(quick) == [1, 2, 3, 4]
    assert list(slow) == []


def test_each_call_of_claim_starts_at_shard_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_store", HashStore())
    assert list(exchange.claim(2)) == [0, 1]
    assert list(exchange.claim(3)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("count", "most", "parts"),
    [
        (7, 1, [range(7)]),
        (7, 2, [range(4), range(4, 7)]),
        (8, 3, [range(2), range(2, 4), range(4, 8)]),
        (7, 7, [range(2), range(2, 4), range(4, 6), range(6, 7)]),
        (1, 4, [range(1)]),
    ],
)
def test_environments_are_divided_into_parts_of_whole_shards(
    count: int, most: int, parts: list[range]
) -> None:
    assert parts_of(count, most) == parts


@pytest.mark.parametrize(
    ("processes", "devices", "parts"),
    [
        (1, ("cpu",), [range(8)]),
        (1, ("cpu:0", "cpu:1"), [range(8)]),
        (2, ("cpu",), [range(2), range(2, 4), range(4, 6), range(6, 8)]),
        (2, ("cpu:0", "cpu:1"), [range(4), range(4, 8)]),
    ],
    ids=["one process", "one process, two devices", "two processes", "two processes, two devices"],
)
def test_environments_of_a_process_train_together_unless_several_processes_share_one_cpu(
    processes: int, devices: tuple[str, ...], parts: list[range], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "world_size", lambda: processes)
    trainer = Trainer(tiny_task(), TrainingConfig(envs=8, hidden_dim=16, devices=devices))
    assert [env.env_indices for env in trainer._training] == [tuple(part) for part in parts]


# --- handshake ------------------------------------------------------------------------------------

Arrive = Callable[..., "Future[str]"]


@pytest.fixture
def store() -> HashStore:
    store = HashStore()
    store.set_timeout(timedelta(seconds=60))
    return store


@pytest.fixture
def arrive(store: HashStore) -> Arrive:
    """Return a function that starts, in a thread, the handshake of one of three ranks."""
    pool = ThreadPoolExecutor(4)
    return lambda rank, seconds=60.0, **common: pool.submit(agree_on_group, store, rank, 3, common, seconds)


def test_each_handshake_returns_the_same_new_group_name_on_all_ranks(arrive: Arrive) -> None:
    """Two handshakes run in the same store, so the second finds the keys of the first."""
    groups: list[set[str]] = []
    for _ in range(2):
        results = [arrive(rank, task="digits") for rank in (0, 2, 1)]
        groups.append({future.result() for future in results})
    assert [len(group) for group in groups] == [1, 1]
    assert groups[0].isdisjoint(groups[1])


def test_nonce_of_a_killed_process_does_not_complete_the_handshake_of_its_rank(
    arrive: Arrive, store: HashStore
) -> None:
    store.set("nonce/1", "of a killed process")
    first, third = arrive(0), arrive(2)
    store.wait(["group/of a killed process"])
    assert not first.done()
    second = arrive(1)
    assert first.result() == second.result() == third.result()


def test_handshake_error_reports_different_settings_with_their_values_and_ranks(arrive: Arrive) -> None:
    results = [
        arrive(0, envs=4, torch="2.13.0", slots=None),
        arrive(1, envs=4, torch="2.12.1", slots=None),
        arrive(2, envs=8, torch="2.13.0", slots=None),
    ]
    for future in results:
        with pytest.raises(HandshakeError) as refusal:
            future.result()
        message = str(refusal.value)
        assert message.startswith(
            "all ranks need the same settings and versions; torch is 2.13.0 on rank 0 and"
        )
        assert "torch is 2.13.0 on rank 0 and 2.12.1 on rank 1 (" in message
        assert "; envs is 4 on rank 0 and 8 on rank 2 (" in message
        assert "slots" not in message


def test_handshake_error_on_all_ranks_reports_the_missing_rank_after_the_timeout(arrive: Arrive) -> None:
    for future in (arrive(2), arrive(0, seconds=0.2)):
        with pytest.raises(HandshakeError, match=r"^rank 1 of 3 did not come within 0.2 s; start all again$"):
            future.result()
