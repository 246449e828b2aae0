"""Alpha over time: the curves, and the ramp that a slot is on.

A ramp of n epochs spends one epoch at each of curve(1/n) … curve(n/n); INSTANT is a ramp of none.
The table's columns are the only state: ``aim`` and ``begin_ramp`` start one,
``tick_ramp`` moves it on.
"""

import math

from esper.leyline.factored_actions import SIGMOID_STEEPNESS, AlphaCurve
from esper.leyline.slot_table import SlotTable


def curve_value(curve: AlphaCurve, progress: float) -> float:
    """Height of a curve at ``progress`` in [0, 1]; every curve runs from 0 to 1 and never falls.

    A sigmoid is stretched so that it meets both ends exactly.
    """
    if progress <= 0.0:
        return 0.0
    if progress >= 1.0:
        return 1.0
    if curve is AlphaCurve.LINEAR:
        return progress
    if curve is AlphaCurve.COSINE:
        return 0.5 - 0.5 * math.cos(math.pi * progress)
    steepness = SIGMOID_STEEPNESS[curve]

    def sigmoid(x: float) -> float:
        return 1.0 / (1.0 + math.exp(-steepness * (x - 0.5)))

    low, high = sigmoid(0.0), sigmoid(1.0)
    return (sigmoid(progress) - low) / (high - low)


def ramp_value(start: float, target: float, curve: AlphaCurve, elapsed: int, epochs: int) -> float:
    """Alpha after ``elapsed`` of ``epochs``; exactly ``target`` from the last one on."""
    if elapsed >= epochs:
        return target
    return start + (target - start) * curve_value(curve, elapsed / epochs)


def aim(table: SlotTable, env: int, slot: int, target: float, epochs: int, curve: AlphaCurve) -> None:
    """Say where the next ramp leads, and how."""
    table.alpha_target[env, slot] = target
    table.ramp_epochs[env, slot] = epochs
    table.ramp_curve[env, slot] = curve


def begin_ramp(table: SlotTable, env: int, slot: int) -> None:
    """Send alpha where ``aim`` said; the epoch that follows is the ramp's first.

    A ramp to where alpha is takes no time: a held seed would otherwise be on its way for ever.
    """
    if table.alpha_target[env, slot] == table.alpha[env, slot]:
        table.ramp_epochs[env, slot] = 0
    table.alpha_from[env, slot] = table.alpha[env, slot]
    table.ramp_elapsed[env, slot] = min(1, table.ramp_epochs[env, slot])
    _settle(table, env, slot)


def tick_ramp(table: SlotTable, env: int, slot: int) -> None:
    """Move a ramp on by one epoch."""
    table.ramp_elapsed[env, slot] += 1
    _settle(table, env, slot)


def _settle(table: SlotTable, env: int, slot: int) -> None:
    table.alpha[env, slot] = ramp_value(
        float(table.alpha_from[env, slot]),
        float(table.alpha_target[env, slot]),
        AlphaCurve(int(table.ramp_curve[env, slot])),
        int(table.ramp_elapsed[env, slot]),
        int(table.ramp_epochs[env, slot]),
    )
