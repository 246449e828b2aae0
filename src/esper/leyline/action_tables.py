"""Lookup tables over the heads of an action, and what is computed on action arrays ``[env, 8]``.

The step loop works on integer arrays and these tables. Every table is derived from the enumerations
and compared with literal expectations when the module is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from esper.leyline.action_heads import (
    AlphaCurve,
    AlphaSpeed,
    AlphaTarget,
    BlendOperator,
    BlueprintAction,
    Head,
    LifecycleOp,
    Style,
    Tempo,
)
from esper.leyline.errors import InvalidActionError

__all__ = [
    "ALPHA_CURVE_NAMES",
    "ALPHA_SPEED_EPOCHS",
    "ALPHA_SPEED_NAMES",
    "ALPHA_TARGET_VALUES",
    "BLEND_IDS",
    "BLUEPRINT_IDS",
    "BLUEPRINT_NULL_INDEX",
    "CANONICAL_ACTION",
    "CNN_BLUEPRINTS",
    "DEFAULT_BLUEPRINT_EMBED_DIM",
    "DEFAULT_FEATURE_DIM",
    "DEFAULT_GAMMA",
    "DEFAULT_LSTM_HIDDEN_DIM",
    "HEADS_OF_OP",
    "HEAD_NAMES",
    "NUM_ALPHA_CURVES",
    "NUM_ALPHA_SPEEDS",
    "NUM_ALPHA_TARGETS",
    "NUM_BLUEPRINTS",
    "NUM_HEADS",
    "NUM_OPS",
    "NUM_STYLES",
    "NUM_TEMPO",
    "OP_ADVANCE",
    "OP_FOSSILIZE",
    "OP_GERMINATE",
    "OP_NAMES",
    "OP_PRUNE",
    "OP_SET_ALPHA_TARGET",
    "OP_WAIT",
    "SIGMOID_STEEPNESS",
    "STYLE_CURVES",
    "STYLE_OPERATORS",
    "TEMPO_EPOCHS",
    "TEMPO_NAMES",
    "TRANSFORMER_BLUEPRINTS",
    "BoolArray",
    "IntArray",
    "canonicalise",
    "check_actions",
    "head_sizes",
    "heads_read",
]

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

NUM_OPS: Final = 6
NUM_BLUEPRINTS: Final = 13
NUM_STYLES: Final = 4
NUM_TEMPO: Final = 3
NUM_ALPHA_TARGETS: Final = 3
NUM_ALPHA_SPEEDS: Final = 4
NUM_ALPHA_CURVES: Final = 5
NUM_HEADS: Final = 8

OP_WAIT: Final = int(LifecycleOp.WAIT)
OP_GERMINATE: Final = int(LifecycleOp.GERMINATE)
OP_SET_ALPHA_TARGET: Final = int(LifecycleOp.SET_ALPHA_TARGET)
OP_PRUNE: Final = int(LifecycleOp.PRUNE)
OP_FOSSILIZE: Final = int(LifecycleOp.FOSSILIZE)
OP_ADVANCE: Final = int(LifecycleOp.ADVANCE)

OP_NAMES: Final = tuple(op.name for op in LifecycleOp)
HEAD_NAMES: Final = tuple(head.name.lower() for head in Head)
BLUEPRINT_IDS: Final = tuple(blueprint.name.lower() for blueprint in BlueprintAction)
BLEND_IDS: Final = tuple(style.name.lower() for style in Style)
TEMPO_NAMES: Final = tuple(tempo.name for tempo in Tempo)
ALPHA_SPEED_NAMES: Final = tuple(speed.name for speed in AlphaSpeed)
ALPHA_CURVE_NAMES: Final = tuple(curve.name for curve in AlphaCurve)

TEMPO_EPOCHS: Final = (3, 5, 8)
ALPHA_TARGET_VALUES: Final = (0.5, 0.7, 1.0)
ALPHA_SPEED_EPOCHS: Final = (0, 3, 5, 8)
SIGMOID_STEEPNESS: Final[Mapping[AlphaCurve, float]] = MappingProxyType(
    {AlphaCurve.SIGMOID_GENTLE: 6.0, AlphaCurve.SIGMOID: 12.0, AlphaCurve.SIGMOID_SHARP: 24.0}
)
STYLE_OPERATORS: Final = (BlendOperator.ADD, BlendOperator.MULTIPLY, BlendOperator.ADD, BlendOperator.GATE)
STYLE_CURVES: Final = (AlphaCurve.LINEAR, AlphaCurve.LINEAR, AlphaCurve.SIGMOID, AlphaCurve.LINEAR)

CNN_BLUEPRINTS: Final = frozenset(
    {
        BlueprintAction.NORM,
        BlueprintAction.ATTENTION,
        BlueprintAction.CONV_SMALL,
        BlueprintAction.DEPTHWISE,
        BlueprintAction.BOTTLENECK,
        BlueprintAction.CONV_LIGHT,
        BlueprintAction.CONV_HEAVY,
    }
)
TRANSFORMER_BLUEPRINTS: Final = frozenset(
    {
        BlueprintAction.NORM,
        BlueprintAction.LORA,
        BlueprintAction.LORA_LARGE,
        BlueprintAction.ATTENTION,
        BlueprintAction.FLEX_ATTENTION,
        BlueprintAction.MLP_SMALL,
        BlueprintAction.MLP,
    }
)

BLUEPRINT_NULL_INDEX: Final = 13
"""Embedding row of an empty slot."""
DEFAULT_BLUEPRINT_EMBED_DIM: Final = 4
DEFAULT_LSTM_HIDDEN_DIM: Final = 256
DEFAULT_FEATURE_DIM: Final = 256
DEFAULT_GAMMA: Final = 0.995
"""Decay per epoch of a measurement's freshness, and the discount where nothing else is said."""

_ALL_HEADS_BY_OP: Final[Mapping[LifecycleOp, tuple[Head, ...]]] = MappingProxyType(
    {
        LifecycleOp.WAIT: (Head.OP,),
        LifecycleOp.GERMINATE: (
            Head.OP,
            Head.SLOT,
            Head.BLUEPRINT,
            Head.STYLE,
            Head.TEMPO,
            Head.ALPHA_TARGET,
        ),
        LifecycleOp.SET_ALPHA_TARGET: (
            Head.OP,
            Head.SLOT,
            Head.ALPHA_TARGET,
            Head.ALPHA_SPEED,
            Head.ALPHA_CURVE,
        ),
        LifecycleOp.PRUNE: (Head.OP, Head.SLOT, Head.ALPHA_SPEED, Head.ALPHA_CURVE),
        LifecycleOp.FOSSILIZE: (Head.OP, Head.SLOT),
        LifecycleOp.ADVANCE: (Head.OP, Head.SLOT),
    }
)


def _heads_table() -> BoolArray:
    table = np.zeros((NUM_OPS, NUM_HEADS), dtype=np.bool_)
    for op, heads in _ALL_HEADS_BY_OP.items():
        table[op, list(heads)] = True
    table.setflags(write=False)
    return table


HEADS_OF_OP: Final = _heads_table()
"""Which heads an op reads, ``[op, head]``: masks, credit, entropy and telemetry index this."""

CANONICAL_ACTION: Final = np.array(
    [
        OP_WAIT,
        0,
        BlueprintAction.NOOP,
        Style.LINEAR_ADD,
        Tempo.STANDARD,
        AlphaTarget.FULL,
        AlphaSpeed.INSTANT,
        AlphaCurve.LINEAR,
    ],
    dtype=np.int64,
)
"""The value ``[head]`` that a head takes when the op does not read it."""
CANONICAL_ACTION.setflags(write=False)


def head_sizes(num_slots: int) -> tuple[int, ...]:
    """Number of values of each head, in ``Head`` order."""
    return (
        NUM_OPS,
        num_slots,
        NUM_BLUEPRINTS,
        NUM_STYLES,
        NUM_TEMPO,
        NUM_ALPHA_TARGETS,
        NUM_ALPHA_SPEEDS,
        NUM_ALPHA_CURVES,
    )


def heads_read(actions: IntArray, alpha: NDArray[np.float64]) -> BoolArray:
    """Which heads matter for each action, ``[env, head]``.

    ``alpha [env]`` is the alpha of the slot acted on: at 0 a removal has no ramp, so neither speed
    nor curve is read; under INSTANT there is no curve.
    """
    read: BoolArray = HEADS_OF_OP[actions[:, Head.OP]]
    no_ramp = alpha == 0.0
    read[:, Head.ALPHA_SPEED] &= ~no_ramp
    instant = actions[:, Head.ALPHA_SPEED] == AlphaSpeed.INSTANT
    read[:, Head.ALPHA_CURVE] &= ~(no_ramp | instant)
    return read


def canonicalise(actions: IntArray, alpha: NDArray[np.float64]) -> IntArray:
    """``actions [env, head]`` with every unread head at its canonical value."""
    return np.where(heads_read(actions, alpha), actions, CANONICAL_ACTION)


def check_actions(actions: IntArray, num_envs: int, num_slots: int) -> None:
    """Refuse an action array of the wrong shape or with an index outside its head."""
    if actions.shape != (num_envs, NUM_HEADS):
        raise InvalidActionError(f"actions must have shape ({num_envs}, {NUM_HEADS}); found {actions.shape}")
    sizes = np.array(head_sizes(num_slots))
    outside = (actions < 0) | (actions >= sizes)
    if outside.any():
        env, head = (int(i) for i in np.argwhere(outside)[0])
        raise InvalidActionError(
            f"head {HEAD_NAMES[head]} of environment {env} has value {actions[env, head]};"
            f" allowed are 0 to {sizes[head] - 1}"
        )


def _check_tables() -> None:
    """Compare the derived tables with literal expectations; ``raise`` survives ``python -O``."""
    expected: tuple[tuple[str, object, object], ...] = (
        ("ops", OP_NAMES, ("WAIT", "GERMINATE", "SET_ALPHA_TARGET", "PRUNE", "FOSSILIZE", "ADVANCE")),
        (
            "blueprints",
            " ".join(BLUEPRINT_IDS),
            "noop conv_light attention norm depthwise bottleneck conv_small conv_heavy"
            " lora lora_large mlp_small mlp flex_attention",
        ),
        ("styles", BLEND_IDS, ("linear_add", "linear_multiply", "sigmoid_add", "gated_gate")),
        ("tempo", TEMPO_NAMES, ("FAST", "STANDARD", "SLOW")),
        ("speeds", ALPHA_SPEED_NAMES, ("INSTANT", "FAST", "MEDIUM", "SLOW")),
        (
            "curves",
            ALPHA_CURVE_NAMES,
            ("LINEAR", "COSINE", "SIGMOID_GENTLE", "SIGMOID", "SIGMOID_SHARP"),
        ),
        ("sizes", head_sizes(3), (6, 3, 13, 4, 3, 3, 4, 5)),
        (
            "enum sizes",
            tuple(
                map(
                    len,
                    (LifecycleOp, BlueprintAction, Style, Tempo, AlphaTarget, AlphaSpeed, AlphaCurve, Head),
                )
            ),
            (6, 13, 4, 3, 3, 4, 5, 8),
        ),
        ("values per style", (len(STYLE_OPERATORS), len(STYLE_CURVES)), (4, 4)),
        (
            "op indices",
            (OP_WAIT, OP_GERMINATE, OP_SET_ALPHA_TARGET, OP_PRUNE, OP_FOSSILIZE, OP_ADVANCE),
            (0, 1, 2, 3, 4, 5),
        ),
        ("heads per op", tuple(HEADS_OF_OP.sum(axis=1).tolist()), (1, 6, 5, 4, 2, 2)),
    )
    for name, found, wanted in expected:
        if found != wanted:
            raise RuntimeError(f"action table '{name}' is {found}, expected {wanted}")


_check_tables()
