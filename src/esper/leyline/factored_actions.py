"""One action with names; and the address at which everything about actions can be imported.

``FactoredAction`` is for edges, display and tests, as the specification asks: the step loop works on
integer arrays and never builds one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from esper.leyline import action_heads, action_tables
from esper.leyline.action_heads import *  # noqa: F403
from esper.leyline.action_heads import (
    AlphaCurve,
    AlphaSpeed,
    AlphaTarget,
    BlendOperator,
    BlueprintAction,
    LifecycleOp,
    Style,
    Tempo,
)
from esper.leyline.action_tables import *  # noqa: F403
from esper.leyline.action_tables import (
    ALPHA_SPEED_EPOCHS,
    ALPHA_TARGET_VALUES,
    BLEND_IDS,
    BLUEPRINT_IDS,
    CANONICAL_ACTION,
    OP_NAMES,
    STYLE_OPERATORS,
    TEMPO_EPOCHS,
    IntArray,
    head_sizes,
)

__all__ = ["FactoredAction"]
__all__ += action_heads.__all__
__all__ += action_tables.__all__


@dataclass(frozen=True, slots=True)
class FactoredAction:
    """One action with names, for people: display, edges and tests."""

    op: LifecycleOp
    slot: int
    blueprint: BlueprintAction
    style: Style
    tempo: Tempo
    alpha_target: AlphaTarget
    alpha_speed: AlphaSpeed
    alpha_curve: AlphaCurve

    @classmethod
    def from_indices(cls, indices: Sequence[int] | IntArray) -> Self:
        """Build from eight indices in ``Head`` order."""
        op, slot, blueprint, style, tempo, target, speed, curve = (int(i) for i in indices)
        return cls(
            LifecycleOp(op),
            slot,
            BlueprintAction(blueprint),
            Style(style),
            Tempo(tempo),
            AlphaTarget(target),
            AlphaSpeed(speed),
            AlphaCurve(curve),
        )

    @property
    def indices(self) -> tuple[int, ...]:
        return (
            int(self.op),
            self.slot,
            int(self.blueprint),
            int(self.style),
            int(self.tempo),
            int(self.alpha_target),
            int(self.alpha_speed),
            int(self.alpha_curve),
        )

    @property
    def is_wait(self) -> bool:
        return self.op is LifecycleOp.WAIT

    @property
    def is_germinate(self) -> bool:
        return self.op is LifecycleOp.GERMINATE

    @property
    def is_set_alpha_target(self) -> bool:
        return self.op is LifecycleOp.SET_ALPHA_TARGET

    @property
    def is_prune(self) -> bool:
        return self.op is LifecycleOp.PRUNE

    @property
    def is_fossilize(self) -> bool:
        return self.op is LifecycleOp.FOSSILIZE

    @property
    def is_advance(self) -> bool:
        return self.op is LifecycleOp.ADVANCE

    @property
    def is_op(self) -> tuple[bool, ...]:
        """The six questions above, in the order of the ops."""
        return (
            self.is_wait,
            self.is_germinate,
            self.is_set_alpha_target,
            self.is_prune,
            self.is_fossilize,
            self.is_advance,
        )

    @property
    def blueprint_id(self) -> str:
        return self.blueprint.name.lower()

    @property
    def blend_id(self) -> str:
        return self.style.name.lower()

    @property
    def operator(self) -> BlendOperator:
        return BlendOperator[self.style.name.rpartition("_")[2]]

    @property
    def tempo_epochs(self) -> int:
        return TEMPO_EPOCHS[self.tempo]

    @property
    def target_value(self) -> float:
        return ALPHA_TARGET_VALUES[self.alpha_target]

    @property
    def speed_epochs(self) -> int:
        return ALPHA_SPEED_EPOCHS[self.alpha_speed]


def check_lookups() -> None:
    """Compare the table look-ups of the step loop with ``FactoredAction``, over every value of every head."""
    for head, size in enumerate(head_sizes(num_slots=1)):
        for value in range(size):
            indices = CANONICAL_ACTION.copy()
            indices[head] = value
            op, _, blueprint, style, *_ = indices
            action = FactoredAction.from_indices(indices)
            pairs: tuple[tuple[object, object], ...] = (
                (action.indices, tuple(indices)),
                (action.is_op.index(True), op),
                (action.op.name, OP_NAMES[op]),
                (action.blueprint_id, BLUEPRINT_IDS[blueprint]),
                (action.blend_id, BLEND_IDS[style]),
                (action.operator, STYLE_OPERATORS[style]),
            )
            for shown, looked_up in pairs:
                if shown != looked_up:
                    raise RuntimeError(f"action {tuple(indices)} is {shown} by name and {looked_up} by table")


if __debug__:  # left out by python -O
    check_lookups()
