"""The eight heads of an action and the values of each, as enumerations."""

from __future__ import annotations

from enum import IntEnum

__all__ = [
    "AlphaCurve",
    "AlphaSpeed",
    "AlphaTarget",
    "BlendOperator",
    "BlueprintAction",
    "Head",
    "LifecycleOp",
    "Style",
    "Tempo",
]


class LifecycleOp(IntEnum):
    """What to do in one step."""

    WAIT = 0
    GERMINATE = 1
    SET_ALPHA_TARGET = 2
    PRUNE = 3
    FOSSILIZE = 4
    ADVANCE = 5


class BlueprintAction(IntEnum):
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
