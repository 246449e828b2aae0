"""Actions with eight heads: enumerations, lookup tables for action arrays ``[env, head]``, and
``FactoredAction``.

The loop over the steps of an episode uses integer arrays and lookup tables. Every lookup table is derived
from the enumerations and compared with literal values at import. ``FactoredAction`` is for display and tests;
the loop over steps creates no ``FactoredAction``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from esper.leyline.errors import InvalidActionError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


class LifecycleOp(IntEnum):
    """Op of an action: the lifecycle operation of one step."""

    WAIT = 0
    GERMINATE = 1
    SET_ALPHA_TARGET = 2
    PRUNE = 3
    FOSSILIZE = 4
    ADVANCE = 5


class BlueprintAction(IntEnum):
    """Blueprint of the seed that an action germinates. NOOP reserves blueprint index 0 and can never be
    chosen."""

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
    """Blend style of a seed: its blend operator, and the alpha curve of its first ramp."""

    LINEAR_ADD = 0
    LINEAR_MULTIPLY = 1
    SIGMOID_ADD = 2
    GATED_GATE = 3


class Tempo(IntEnum):
    """Length of the first alpha ramp of a seed."""

    FAST = 0
    STANDARD = 1
    SLOW = 2


class AlphaTarget(IntEnum):
    """Value of alpha at the end of a ramp."""

    HALF = 0
    SEVENTY = 1
    FULL = 2


class AlphaSpeed(IntEnum):
    """Length of an alpha ramp after a seed's first ramp."""

    INSTANT = 0
    FAST = 1
    MEDIUM = 2
    SLOW = 3


class AlphaCurve(IntEnum):
    """Curve of an alpha ramp."""

    LINEAR = 0
    COSINE = 1
    SIGMOID_GENTLE = 2
    SIGMOID = 3
    SIGMOID_SHARP = 4


class BlendOperator(IntEnum):
    """Blend operator: how the output d of a seed at alpha a changes the host features h.

    Results of the blend operators: ADD h + a·d, MULTIPLY h·(1 + a·tanh d), GATE h + a·g(h)·d.
    """

    ADD = 0
    MULTIPLY = 1
    GATE = 2


class Head(IntEnum):
    """Column index of each head in an action array."""

    OP = 0
    SLOT = 1
    BLUEPRINT = 2
    STYLE = 3
    TEMPO = 4
    ALPHA_TARGET = 5
    ALPHA_SPEED = 6
    ALPHA_CURVE = 7


NUM_OPS, NUM_BLUEPRINTS, NUM_STYLES, NUM_TEMPO = map(len, (LifecycleOp, BlueprintAction, Style, Tempo))
NUM_HEADS: Final = len(Head)
CHOICES: Final = (BlueprintAction, Style, Tempo, AlphaTarget, AlphaSpeed, AlphaCurve)
"""Enumeration of the values of every head in ``Head`` order, without the heads op and slot."""
OP_WAIT, OP_GERMINATE, OP_SET_ALPHA_TARGET, OP_PRUNE, OP_FOSSILIZE, OP_ADVANCE = map(int, LifecycleOp)

OP_NAMES: Final = tuple(op.name for op in LifecycleOp)
HEAD_NAMES: Final = tuple(head.name.lower() for head in Head)
BLUEPRINT_NAMES: Final = tuple(blueprint.name.lower() for blueprint in BlueprintAction)
BLUEPRINT_IDS: Final = (None, *BLUEPRINT_NAMES[1:])
"""Blueprint id of each value of the head ``blueprint``; None for NOOP, which plants nothing."""
BLEND_IDS: Final = tuple(style.name.lower() for style in Style)

TEMPO_EPOCHS: Final = (3, 5, 8)
ALPHA_TARGET_VALUES: Final = (0.5, 0.7, 1.0)
ALPHA_SPEED_EPOCHS: Final = (0, 3, 5, 8)
SIGMOID_STEEPNESS: Final[Mapping[AlphaCurve, float]] = {
    AlphaCurve.SIGMOID_GENTLE: 6.0,
    AlphaCurve.SIGMOID: 12.0,
    AlphaCurve.SIGMOID_SHARP: 24.0,
}
STYLE_OPERATORS: Final = (BlendOperator.ADD, BlendOperator.MULTIPLY, BlendOperator.ADD, BlendOperator.GATE)
STYLE_CURVES: Final = (AlphaCurve.LINEAR, AlphaCurve.LINEAR, AlphaCurve.SIGMOID, AlphaCurve.LINEAR)


def _blueprints(names: str) -> frozenset[BlueprintAction]:
    return frozenset(BlueprintAction[name.upper()] for name in names.split())


CNN_BLUEPRINTS: Final = _blueprints("norm attention conv_small depthwise bottleneck conv_light conv_heavy")
TRANSFORMER_BLUEPRINTS: Final = _blueprints("norm lora lora_large attention flex_attention mlp_small mlp")
FEATURE_BLUEPRINTS: Final = _blueprints("norm lora lora_large mlp_small mlp")

BLUEPRINT_NULL_INDEX: Final = 13
"""Row of the blueprint embedding that represents an empty slot."""
DEFAULT_BLUEPRINT_EMBED_DIM: Final = 4
DEFAULT_LSTM_HIDDEN_DIM: Final = 256
DEFAULT_FEATURE_DIM: Final = 256
DEFAULT_GAMMA: Final = 0.995
"""Factor by which the freshness of a measurement decays per epoch; also the default discount factor of reward
families."""

_READS: Final[Mapping[LifecycleOp, str]] = {
    LifecycleOp.WAIT: "op",
    LifecycleOp.GERMINATE: "op slot blueprint style tempo alpha_target",
    LifecycleOp.SET_ALPHA_TARGET: "op slot alpha_target alpha_speed alpha_curve",
    LifecycleOp.PRUNE: "op slot alpha_speed alpha_curve",
    LifecycleOp.FOSSILIZE: "op slot",
    LifecycleOp.ADVANCE: "op slot",
}
HEADS_OF_OP: Final = np.array([[name in read.split() for name in HEAD_NAMES] for read in _READS.values()])
"""Heads that each op reads, bool ``[op, head]``; used for masks, credit assignment, entropy and telemetry."""
HEADS_OF_OP.setflags(write=False)

_FULL_AT_ONCE: Final = (AlphaTarget.FULL, AlphaSpeed.INSTANT, AlphaCurve.LINEAR)
CANONICAL_ACTION: Final = np.array(
    [OP_WAIT, 0, BlueprintAction.NOOP, Style.LINEAR_ADD, Tempo.STANDARD, *_FULL_AT_ONCE], dtype=np.int64
)
"""Canonical index of every head, ``[head]``; it replaces the index in heads that the op does not read."""
CANONICAL_ACTION.setflags(write=False)


def head_sizes(num_slots: int) -> tuple[int, ...]:
    """Return the number of values of each head, in ``Head`` order."""
    return (NUM_OPS, num_slots, *map(len, CHOICES))


def heads_read(actions: IntArray, alpha: FloatArray) -> BoolArray:
    """Return which heads of each action have an effect, bool ``[env, head]``.

    Argument ``alpha [env]`` is the present alpha of each action's slot. At alpha 0 there is no ramp, so speed
    and curve are not read; at speed INSTANT the curve is not read.
    """
    read: BoolArray = HEADS_OF_OP[actions[:, Head.OP]]
    no_ramp = alpha == 0.0
    read[:, Head.ALPHA_SPEED] &= ~no_ramp
    instant = actions[:, Head.ALPHA_SPEED] == AlphaSpeed.INSTANT
    read[:, Head.ALPHA_CURVE] &= ~(no_ramp | instant)
    return read


def canonicalise(actions: IntArray, alpha: FloatArray) -> IntArray:
    """Return ``actions [env, head]`` with the canonical index in every head that the op does not read."""
    return np.where(heads_read(actions, alpha), actions, CANONICAL_ACTION)


def check_actions(actions: IntArray, num_envs: int, num_slots: int) -> None:
    """Raise ``InvalidActionError`` if an action array has a wrong shape or an index out of range."""
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
    """Compare the lookup tables with literal values and raise an error if they differ; there is no
    ``assert``, because ``python -O`` would remove it."""
    names = (
        "WAIT GERMINATE SET_ALPHA_TARGET PRUNE FOSSILIZE ADVANCE",
        "NOOP CONV_LIGHT ATTENTION NORM DEPTHWISE BOTTLENECK CONV_SMALL CONV_HEAVY"
        " LORA LORA_LARGE MLP_SMALL MLP FLEX_ATTENTION",
        "LINEAR_ADD LINEAR_MULTIPLY SIGMOID_ADD GATED_GATE",
        "FAST STANDARD SLOW",
        "HALF SEVENTY FULL",
        "INSTANT FAST MEDIUM SLOW",
        "LINEAR COSINE SIGMOID_GENTLE SIGMOID SIGMOID_SHARP",
    )
    kinds: tuple[type[IntEnum], ...] = (LifecycleOp, *CHOICES)
    expected: Mapping[str, tuple[object, object]] = {
        **{kind.__name__: (" ".join(kind.__members__), row) for kind, row in zip(kinds, names, strict=True)},
        "sizes": (head_sizes(3), (6, 3, 13, 4, 3, 3, 4, 5)),
        "heads": (NUM_HEADS, 8),
        "values per style": ((len(STYLE_OPERATORS), len(STYLE_CURVES)), (4, 4)),
        "heads per op": (HEADS_OF_OP.sum(axis=1).tolist(), [1, 6, 5, 4, 2, 2]),
    }
    for name, (found, wanted) in expected.items():
        if found != wanted:
            raise RuntimeError(f"action table '{name}' is {found}, expected {wanted}")


_check_tables()


def _is(op: LifecycleOp) -> property:
    return property(lambda action: action.op is op)


@dataclass(frozen=True, slots=True)
class FactoredAction:
    """One action with named fields, for display and tests."""

    op: LifecycleOp
    slot: int
    blueprint: BlueprintAction
    style: Style
    tempo: Tempo
    alpha_target: AlphaTarget
    alpha_speed: AlphaSpeed
    alpha_curve: AlphaCurve

    @classmethod
    def from_indices(cls, indices: Sequence[int] | IntArray) -> FactoredAction:
        """Return the ``FactoredAction`` of eight indices in ``Head`` order."""
        kinds = (LifecycleOp, int, *CHOICES)
        return cls(*(kind(int(index)) for kind, index in zip(kinds, indices, strict=True)))

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(int(value) for value in astuple(self))

    is_wait = _is(LifecycleOp.WAIT)
    is_germinate = _is(LifecycleOp.GERMINATE)
    is_set_alpha_target = _is(LifecycleOp.SET_ALPHA_TARGET)
    is_prune = _is(LifecycleOp.PRUNE)
    is_fossilize = _is(LifecycleOp.FOSSILIZE)
    is_advance = _is(LifecycleOp.ADVANCE)

    @property
    def blueprint_id(self) -> str | None:
        return BLUEPRINT_IDS[self.blueprint]

    @property
    def blend_id(self) -> str:
        return self.style.name.lower()

    @property
    def operator(self) -> BlendOperator:
        return BlendOperator[self.style.name.rpartition("_")[2]]
