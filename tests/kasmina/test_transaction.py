"""``Transaction``: what a failed change leaves."""

import pytest
from torch import nn

from esper.kasmina.transaction import Transaction


def test_failed_change_restores_the_blocks_of_a_list_that_were_deleted_and_inserted() -> None:
    blocks = nn.ModuleList(nn.Linear(size, size) for size in (1, 2, 3))
    before = dict(blocks.named_children())

    def change() -> None:
        with Transaction([blocks]):
            del blocks[1]  # Gives the list another dict of its children.
            blocks.insert(0, nn.Linear(4, 4))
            raise KeyError

    with pytest.raises(KeyError):
        change()
    assert dict(blocks.named_children()) == before
    assert list(blocks.state_dict()) == [f"{i}.{name}" for i in range(3) for name in ("weight", "bias")]
