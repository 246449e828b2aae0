"""The action space: eight heads, their values, and which heads each operation reads.

The hot path works on integer arrays ``[env, 8]`` and the module-level lookup tables;
``FactoredAction`` is a readable view of one row for edges, display and tests, and is never built
inside the step loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from esper.leyline.errors import InvalidActionError

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


class Op(IntEnum):
    """What to do in one step."""

    WAIT = 0
    GERMINATE = 1
    SET_ALPHA_TARGET = 2
    PRUNE = 3
    FOSSILIZE = 4
    ADVANCE = 5


class Blueprint(IntEnum):
    """Which seed to germinate. NOOP keeps index 0 out of use: it is never selectable."""

    NOOP = 0
    CONV_LIGHT = 1
    ATTENTION = 2
    NORM = 3
    DEPTHWISE = 4
    BOTTLENECK = 5
    CONV_SMALL = 6
    CONV_HEAVY = 7
    LORA = 8
    LORA_LARGE = 9
    MLP_SMALL = 10
    MLP = 11
    FLEX_ATTENTION = 12


class Style(IntEnum):
    """How a seed is joined to the host: operator and the curve of its first ramp."""

    LINEAR_ADD = 0
    LINEAR_MULTIPLY = 1
    SIGMOID_ADD = 2
    GATED_GATE = 3


class Tempo(IntEnum):
    """Length of the first ramp."""

    FAST = 0
    STANDARD = 1
    SLOW = 2


class AlphaTarget(IntEnum):
    """Where alpha goes."""

    HALF = 0
    SEVENTY = 1
    FULL = 2


class AlphaSpeed(IntEnum):
    """Length of a later ramp."""

    INSTANT = 0
    FAST = 1
    MEDIUM = 2
    SLOW = 3


class AlphaCurve(IntEnum):
    """Shape of a ramp."""

    LINEAR = 0
    COSINE = 1
    SIGMOID_GENTLE = 2
    SIGMOID = 3
    SIGMOID_SHARP = 4


class BlendOperator(IntEnum):
    """ADD h + a·d, MULTIPLY h·(1 + a·tanh d), GATE h + a·g(h)·d."""

    ADD = 0
    MULTIPLY = 1
    GATE = 2


class Head(IntEnum):
    """Column of each head in an action array."""

    OP = 0
    SLOT = 1
    BLUEPRINT = 2
    STYLE = 3
    TEMPO = 4
    ALPHA_TARGET = 5
    ALPHA_SPEED = 6
    ALPHA_CURVE = 7


NUM_OPS: Final = 6
NUM_BLUEPRINTS: Final = 13
NUM_STYLES: Final = 4
NUM_TEMPO: Final = 3
NUM_ALPHA_TARGETS: Final = 3
NUM_ALPHA_SPEEDS: Final = 4
NUM_ALPHA_CURVES: Final = 5
NUM_HEADS: Final = 8

OP_WAIT: Final = int(Op.WAIT)
OP_GERMINATE: Final = int(Op.GERMINATE)
OP_SET_ALPHA_TARGET: Final = int(Op.SET_ALPHA_TARGET)
OP_PRUNE: Final = int(Op.PRUNE)
OP_FOSSILIZE: Final = int(Op.FOSSILIZE)
OP_ADVANCE: Final = int(Op.ADVANCE)

OP_NAMES: Final = tuple(op.name for op in Op)
HEAD_NAMES: Final = tuple(head.name.lower() for head in Head)
BLUEPRINT_IDS: Final = tuple(blueprint.name.lower() for blueprint in Blueprint)
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
        Blueprint.NORM,
        Blueprint.ATTENTION,
        Blueprint.CONV_SMALL,
        Blueprint.DEPTHWISE,
        Blueprint.BOTTLENECK,
        Blueprint.CONV_LIGHT,
        Blueprint.CONV_HEAVY,
    }
)
TRANSFORMER_BLUEPRINTS: Final = frozenset(
    {
        Blueprint.NORM,
        Blueprint.LORA,
        Blueprint.LORA_LARGE,
        Blueprint.ATTENTION,
        Blueprint.FLEX_ATTENTION,
        Blueprint.MLP_SMALL,
        Blueprint.MLP,
    }
)

BLUEPRINT_NULL_INDEX: Final = 13
"""Embedding row of an empty slot."""
DEFAULT_BLUEPRINT_EMBED_DIM: Final = 4
DEFAULT_LSTM_HIDDEN_DIM: Final = 256
DEFAULT_FEATURE_DIM: Final = 256
DEFAULT_GAMMA: Final = 0.995
"""Decay per epoch of a measurement's freshness, and the discount where nothing else is said."""

_ALL_HEADS_BY_OP: Final[Mapping[Op, tuple[Head, ...]]] = MappingProxyType(
    {
        Op.WAIT: (Head.OP,),
        Op.GERMINATE: (Head.OP, Head.SLOT, Head.BLUEPRINT, Head.STYLE, Head.TEMPO, Head.ALPHA_TARGET),
        Op.SET_ALPHA_TARGET: (Head.OP, Head.SLOT, Head.ALPHA_TARGET, Head.ALPHA_SPEED, Head.ALPHA_CURVE),
        Op.PRUNE: (Head.OP, Head.SLOT, Head.ALPHA_SPEED, Head.ALPHA_CURVE),
        Op.FOSSILIZE: (Head.OP, Head.SLOT),
        Op.ADVANCE: (Head.OP, Head.SLOT),
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
        Blueprint.NOOP,
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


@dataclass(frozen=True, slots=True)
class FactoredAction:
    """One action with names, for people: display, edges and tests."""

    op: Op
    slot: int
    blueprint: Blueprint
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
            Op(op),
            slot,
            Blueprint(blueprint),
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
        return self.op is Op.WAIT

    @property
    def is_germinate(self) -> bool:
        return self.op is Op.GERMINATE

    @property
    def is_set_alpha_target(self) -> bool:
        return self.op is Op.SET_ALPHA_TARGET

    @property
    def is_prune(self) -> bool:
        return self.op is Op.PRUNE

    @property
    def is_fossilize(self) -> bool:
        return self.op is Op.FOSSILIZE

    @property
    def is_advance(self) -> bool:
        return self.op is Op.ADVANCE

    @property
    def blueprint_id(self) -> str:
        return BLUEPRINT_IDS[self.blueprint]

    @property
    def blend_id(self) -> str:
        return BLEND_IDS[self.style]

    @property
    def operator(self) -> BlendOperator:
        return STYLE_OPERATORS[self.style]

    @property
    def tempo_epochs(self) -> int:
        return TEMPO_EPOCHS[self.tempo]

    @property
    def target_value(self) -> float:
        return ALPHA_TARGET_VALUES[self.alpha_target]

    @property
    def speed_epochs(self) -> int:
        return ALPHA_SPEED_EPOCHS[self.alpha_speed]


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
            tuple(map(len, (Op, Blueprint, Style, Tempo, AlphaTarget, AlphaSpeed, AlphaCurve, Head))),
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
