import pytest
import torch

from esper.leyline import NUM_HEADS, NUM_OPS, head_sizes
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.tamiyo.networks.factored_lstm import Hidden, PolicyDecision

WIDTH = sum(head_sizes(2))


def hidden_of(value: float) -> Hidden:
    return torch.full((1, 3, 5), value), torch.full((1, 3, 5), value + 0.5)


def decision(number: int) -> PolicyDecision:
    """Return a decision of all environments; its tensors encode the environment and ``number``."""
    mark = torch.arange(3.0) + 10 * number
    return PolicyDecision(
        actions=mark.long().unsqueeze(1).expand(3, NUM_HEADS),
        log_probs=-mark.unsqueeze(1).expand(3, NUM_HEADS),
        masks=(torch.arange(WIDTH) == number).expand(3, WIDTH),
        op_probs=mark.unsqueeze(1).expand(3, NUM_OPS) / 4,
        value=mark / 2,
        hidden=hidden_of(float(number)),
    )


def filled(steps: int = 4) -> TamiyoRolloutBuffer:
    buffer = TamiyoRolloutBuffer(3, 4, state_dim=6, num_slots=2, hidden_dim=5)
    buffer.hidden = hidden_of(7.0)
    for step in range(steps):
        mark = torch.arange(3.0) + 10 * step
        fresh = torch.tensor([step == 0, step == 0, step == 2])
        blueprints = mark.long().unsqueeze(1).expand(3, 2)
        buffer.add(mark.unsqueeze(1).expand(3, 6), blueprints, decision(step), fresh)
        ended = torch.tensor([step == 3, False, step == 1])
        buffer.add_outcome(mark + 100, ended, ended & (torch.arange(3) == 0))
        buffer.add_next_value(mark + 200)
    return buffer


ROWS = torch.tensor([[0.0, 10.0, 20.0, 30.0], [1.0, 11.0, 21.0, 31.0], [2.0, 12.0, 22.0, 32.0]])
"""Expected content ``[env, step]`` of a rollout buffer; a value is the environment index plus 10 · step."""


def test_tensors_of_the_rollout_buffer_are_indexed_by_environment_and_step() -> None:
    buffer = filled()
    assert torch.equal(buffer.state, ROWS.unsqueeze(-1).expand(3, 4, 6))
    assert torch.equal(buffer.blueprint_indices, ROWS.long().unsqueeze(-1).expand(3, 4, 2))
    assert torch.equal(buffer.actions, ROWS.long().unsqueeze(-1).expand(3, 4, NUM_HEADS))
    assert torch.equal(buffer.log_probs, -ROWS.unsqueeze(-1).expand(3, 4, NUM_HEADS))
    assert torch.equal(
        buffer.masks, (torch.arange(WIDTH) == torch.arange(4).unsqueeze(1)).expand(3, 4, WIDTH)
    )
    assert torch.equal(buffer.values, ROWS / 2)
    assert torch.equal(buffer.rewards, ROWS + 100)
    assert torch.equal(buffer.next_values, ROWS + 200)
    assert buffer.ended.nonzero().tolist() == [[0, 3], [2, 1]]
    assert buffer.terminated.nonzero().tolist() == [[0, 3]]
    assert buffer.fresh.nonzero().tolist() == [[0, 0], [1, 0], [2, 2]]
    assert buffer.length == 4


def test_add_to_a_full_rollout_buffer_raises_runtime_error() -> None:
    with pytest.raises(RuntimeError, match="holds 4 steps and is full"):
        filled(5)


def test_sequences_of_the_rollout_buffer_have_all_steps_and_the_initial_lstm_state() -> None:
    buffer = filled()
    state, blueprint_indices, actions, masks, hidden, fresh = buffer.get_batched_sequences(slice(1, 3))
    assert torch.equal(state, buffer.state[1:])
    assert torch.equal(blueprint_indices, buffer.blueprint_indices[1:])
    assert torch.equal(actions, buffer.actions[1:])
    assert torch.equal(masks, buffer.masks[1:])
    assert torch.equal(fresh, buffer.fresh[1:])
    assert [tuple(part.shape) for part in hidden] == [(1, 2, 5)] * 2
    assert len(buffer.get_batched_sequences()[0]) == 3


def test_join_of_rollout_buffers_concatenates_environments() -> None:
    first, second = filled(), filled()
    second.state += 0.25
    second.hidden[1].add_(0.25)
    joined = TamiyoRolloutBuffer.join([first, second])
    assert torch.equal(joined.state, torch.cat([first.state, second.state]))
    assert torch.equal(joined.rewards, torch.cat([ROWS, ROWS]) + 100)
    assert torch.equal(joined.hidden[1], torch.cat([first.hidden[1], second.hidden[1]], dim=1))
    assert joined.hidden[0].shape == (1, 6, 5)
    assert joined.fresh.nonzero().tolist() == [[0, 0], [1, 0], [2, 2], [3, 0], [4, 0], [5, 2]]
    assert (joined.length, first.state.shape[0]) == (4, 3)
