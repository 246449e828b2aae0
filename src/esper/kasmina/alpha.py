"""Alpha ramps: curves of the blend weight, and their progress in the slot table.

A ramp of n epochs has alpha at curve(1/n), …, curve(n/n), one epoch each; INSTANT is a ramp of 0 epochs.
``aim`` sets target and length, ``begin_ramp`` starts the ramp, ``tick_ramp`` advances it. All state is in
columns of the slot table.
"""

import math

from esper.leyline import SIGMOID_STEEPNESS, AlphaCurve, SlotTable


def curve_value(curve: AlphaCurve, progress: float) -> float:
    """Return the value of a curve at ``progress`` in [0, 1]; every curve rises monotonically from 0 to 1.

    A sigmoid is rescaled so that it is exactly 0 at the start and 1 at the end.
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
    """Return alpha after ``elapsed`` of ``epochs`` epochs; exactly ``target`` from the last one on."""
    if elapsed >= epochs:
        return target
    return start + (target - start) * curve_value(curve, elapsed / epochs)


def aim(table: SlotTable, env: int, slot: int, target: float, epochs: int, curve: AlphaCurve) -> None:
    """Set target, length and curve of the next ramp."""
    table.alpha_target[env, slot] = target
    table.ramp_epochs[env, slot] = epochs
    table.ramp_curve[env, slot] = curve


def begin_ramp(table: SlotTable, env: int, slot: int) -> None:
    """Start the ramp that ``aim`` has set; the next epoch is its first.

    A ramp to the present alpha has 0 epochs: a held seed's ramp is never advanced and would not end.
    """
    if table.alpha_target[env, slot] == table.alpha[env, slot]:
        table.ramp_epochs[env, slot] = 0
    table.alpha_from[env, slot] = table.alpha[env, slot]
    table.ramp_elapsed[env, slot] = min(1, table.ramp_epochs[env, slot])
    _settle(table, env, slot)


def tick_ramp(table: SlotTable, env: int, slot: int) -> None:
    """Advance a ramp by one epoch."""
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
