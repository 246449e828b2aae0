"""Alpha ramps: curves of the blend weight, and their progress in the slot table.

In a ramp of n epochs, alpha has the values curve(1/n), …, curve(n/n), one per epoch; INSTANT is a ramp of 0
epochs. Function ``aim`` sets target and length of a ramp, ``begin_ramp`` starts the ramp, ``tick_ramp``
advances it. The state of a ramp is stored in columns of the slot table.
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
    """Return alpha after ``elapsed`` of ``epochs`` epochs of a ramp; exactly ``target`` from the last epoch
    on.
    """
    if elapsed >= epochs:
        return target
    return start + (target - start) * curve_value(curve, elapsed / epochs)


def aim(table: SlotTable, env: int, slot: int, target: float, epochs: int, curve: AlphaCurve) -> None:
    """Set target, length and curve of the next alpha ramp."""
    table.alpha_target[env, slot] = target
    table.ramp_epochs[env, slot] = epochs
    table.ramp_curve[env, slot] = curve


def begin_ramp(table: SlotTable, env: int, slot: int) -> None:
    """Start the alpha ramp that ``aim`` has set; the next epoch is the first epoch of the ramp.

    A ramp to the present alpha has 0 epochs: the ramp of a held seed is never advanced and would not end.
    """
    if table.alpha_target[env, slot] == table.alpha[env, slot]:
        table.ramp_epochs[env, slot] = 0
    table.alpha_from[env, slot] = table.alpha[env, slot]
    table.ramp_elapsed[env, slot] = min(1, table.ramp_epochs[env, slot])
    _settle(table, env, slot)


def tick_ramp(table: SlotTable, env: int, slot: int) -> None:
    """Advance an alpha ramp by one epoch."""
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
