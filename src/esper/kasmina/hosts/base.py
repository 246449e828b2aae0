"""What a host is to the rest: a chain of segments, which can be entered at every slot between two of them."""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from esper.kasmina.blueprints import Topology
from esper.kasmina.slot import SeedSlot
from esper.leyline.slot_config import SlotConfig


class Host(nn.Module):
    """A chain of segments with a slot after each but the last.

    ``segments[0]`` takes the input, ``segments[i + 1]`` what leaves slot ``i``. Subclasses also set
    ``slot_config``, ``topology`` and ``feature_shapes`` (one sample's features at each slot, without the
    batch) when they are built.
    """

    segments: nn.ModuleList
    slot_config: SlotConfig
    topology: Topology
    feature_shapes: tuple[tuple[int, ...], ...]
    spec: dict[str, Any]
    """What a built-in host was built with."""
    block_kind: ClassVar[type[nn.Module] | None] = None
    """Modules of this class keep the shape of their input: they can be stacked."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of a feature map, or model width of tokens, at each slot."""
        axis = 0 if self.topology == "feature_map" else -1
        return tuple(shape[axis] for shape in self.feature_shapes)

    def original(self, slot: int) -> nn.Module | None:
        """The last block before ``slot`` that could be repeated there; a copy of it is a ``stack`` seed."""
        upstream = [part for segment in self.segments[: slot + 1] for part in segment.children()]
        blocks = [part for part in upstream if self.block_kind and isinstance(part, self.block_kind)]
        return blocks[-1] if blocks else None

    def forward(self, x: Tensor, slots: Sequence[SeedSlot], start: int | None = None) -> Tensor:
        """Output for ``x``, or from the features ``x`` at slot ``start`` on."""
        h = self.segments[0](x) if start is None else x
        for index in range(start or 0, len(slots)):
            if slots[index].engaged:
                h = slots[index](h)
            h = self.segments[index + 1](h)
        return h
