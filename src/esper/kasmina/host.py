"""Base class of the built-in hosts: modules that run in sequence, with a slot after every module but the
last."""

from typing import Any, ClassVar

from torch import Tensor, nn

from esper.kasmina.blueprints import Topology
from esper.kasmina.sites import Site
from esper.leyline.rules import SlotConfig


class Host(nn.Module):
    """Network that runs the modules in ``segments`` in sequence; ``MorphogeneticModel`` adds the slots.

    Subclasses of ``Host`` set ``segments``, ``topology`` and ``feature_shapes`` in their constructor.
    """

    segments: nn.ModuleList
    topology: Topology
    feature_shapes: tuple[tuple[int, ...], ...]
    """Shape of one sample's features at each slot, without the batch axis."""
    spec: dict[str, Any]
    """Arguments that a built-in host was constructed with."""
    channels_last: ClassVar[bool] = False
    is_causal: ClassVar[bool] = True
    """For tokens, whether seeds must not use later tokens."""
    block_kind: ClassVar[type[nn.Module] | None] = None
    """Class of the host's blocks. The output of a block has the shape of its input, so that a copy of the
    block can follow it."""

    @property
    def sites(self) -> list[Site]:
        """Sites of the slots: after every module in ``segments`` but the last; for a ``Sequential``, at its
        last child."""
        names = SlotConfig.of_count(len(self.feature_shapes)).slot_ids
        axis = 0 if self.topology in {"feature_map", "volume"} else -1
        return [
            Site(
                name=name,
                path=self._carrier(index),
                topology=self.topology,
                width=shape[axis],
                shape=(2, *shape),
                block=self._block_before(index),
                channels_last=self.channels_last,
                is_causal=self.is_causal,
            )
            for index, (name, shape) in enumerate(zip(names, self.feature_shapes, strict=True))
        ]

    def _carrier(self, segment: int) -> str:
        path, module = f"segments.{segment}", self.segments[segment]
        while isinstance(module, nn.Sequential):
            name, module = list(module.named_children())[-1]
            path = f"{path}.{name}"
        return path

    def _block_before(self, slot: int) -> str | None:
        """Return the path of the last block upstream of ``slot``, which a ``stack`` seed can copy; None if
        there is none."""
        blocks = [
            f"segments.{index}.{name}"
            for index, segment in enumerate(self.segments[: slot + 1])
            for name, part in segment.named_children()
            if self.block_kind and isinstance(part, self.block_kind)
        ]
        return blocks[-1] if blocks else None

    def sample_input(self, batch: int) -> Tensor | None:
        """Return an input of ``batch`` samples with the shape and dtype that the host expects; None if
        unknown."""
        return None

    def forward(self, x: Tensor) -> Tensor:
        """Run the modules in ``segments`` in sequence."""
        for segment in self.segments:
            x = segment(x)
        return x
