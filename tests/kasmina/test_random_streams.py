"""Random streams, which leave torch's global random state unchanged."""

import copy
import pickle

import pytest
import torch

from esper.kasmina import TorchStream
from esper.kasmina.network import slot_streams
from tests.contracts.matrix import restart


def draw(stream: TorchStream, count: int = 3) -> list[float]:
    """Return the next ``count`` random numbers of ``stream``."""
    with stream:
        return torch.rand(count).tolist()


def test_random_stream_continues_at_its_last_position_and_leaves_the_global_state_unchanged() -> None:
    whole = draw(TorchStream(7), 6)
    stream = TorchStream(7)
    restart(1)
    before = torch.get_rng_state()
    first = draw(stream)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    assert first + draw(stream) == whole


def test_nested_random_streams_are_independent_and_slots_and_rng_seeds_have_different_streams() -> None:
    outer, inner = TorchStream(1), TorchStream(2)
    with outer:
        first = torch.rand(2).tolist()
        nested = draw(inner)
        second = torch.rand(2).tolist()
    assert first + second == draw(TorchStream(1), 4)
    assert nested == draw(TorchStream(2))
    places = ((0, "r0c0"), (0, "r0c0"), (0, "r0c1"), (1, "r0c0"))
    first, same, *others = (draw(slot_streams(rng_seed)(slot_id)) for rng_seed, slot_id in places)
    assert first == same
    assert first not in others


def test_error_inside_a_random_stream_restores_the_global_state_and_entering_it_twice_is_refused() -> None:
    restart(1)
    before = torch.get_rng_state()
    stream = TorchStream(7)
    with pytest.raises(ZeroDivisionError), stream:
        _ = torch.rand(3).numel() / 0
    assert torch.equal(torch.get_rng_state(), before)
    assert draw(stream) == draw(TorchStream(7), 6)[3:], "numbers drawn before the error are not repeated"
    with stream, pytest.raises(RuntimeError, match="cannot be entered twice"):
        stream.__enter__()


def test_random_stream_returns_to_a_saved_position_and_its_copies_draw_the_same_numbers() -> None:
    stream = TorchStream(7)
    draw(stream)
    position = stream.get_state()
    copies = copy.deepcopy(stream), pickle.loads(pickle.dumps(stream))
    wanted = draw(stream)
    stream.set_state(position)
    assert draw(stream) == wanted
    assert [draw(other) for other in copies] == [wanted, wanted]
