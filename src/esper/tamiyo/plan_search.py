"""Search for the best open-loop plan: random plans first, then changes of the best.

What a plan is worth is for the caller to find out; each generation is proposed from all that is known.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np

from esper.leyline import ActionSpace
from esper.leyline.stream_seeds import derive_seed

GENERATIONS: Final = 4
PARENTS: Final = 3
"""The best plans so far, whose changes the later generations try."""

Entries = tuple[tuple[int, str], ...]
"""(step, blueprint) in ascending order; slots are filled upstream first."""


def propose(known: Mapping[str, float], count: int, space: ActionSpace, last: int) -> list[str]:
    """``count`` plans that are not ``known`` (losses by plan), with germinations at steps below ``last``.

    Fewer where no more can be found. The same ``known`` gets the same proposals.
    """
    rng = np.random.default_rng(derive_seed(len(known), "plans"))
    parents = sorted(known, key=lambda plan: known[plan])[:PARENTS]
    found: list[str] = []
    for _ in range(50 * count):
        parent = _read(parents[rng.integers(len(parents))]) if parents else None
        plan = _written(_drawn(rng, space, last) if parent is None else _changed(parent, rng, space, last))
        if plan and plan not in known and plan not in found:
            found.append(plan)
        if len(found) == count:
            break
    return found


def _drawn(rng: np.random.Generator, space: ActionSpace, last: int) -> Entries:
    """As many seeds of one blueprint as it happens, at steps that are even on a logarithmic scale."""
    blueprint, count = _blueprint(rng, space), rng.integers(1, space.slot_config.num_slots + 1)
    return _ordered([(_step(rng, last), blueprint) for _ in range(count)])


def _changed(entries: Entries, rng: np.random.Generator, space: ActionSpace, last: int) -> Entries:
    """One entry moved in time, exchanged, removed or added."""
    changed = list(entries)
    at = int(rng.integers(len(changed)))
    step, blueprint = changed[at]
    match rng.integers(4):
        case 0:
            changed[at] = (min(max(round(step * np.exp(rng.normal(0.0, 0.5))), 0), last - 1), blueprint)
        case 1:
            changed[at] = (step, _blueprint(rng, space))
        case 2 if len(changed) > 1:
            del changed[at]
        case _ if len(changed) < space.slot_config.num_slots:
            changed.append((_step(rng, last), _blueprint(rng, space)))
    return _ordered(changed)


def _step(rng: np.random.Generator, last: int) -> int:
    return int(np.exp(rng.uniform(0.0, np.log(last + 1.0)))) - 1


def _blueprint(rng: np.random.Generator, space: ActionSpace) -> str:
    return space.blueprint_names[rng.choice(space.blueprints)]


def _ordered(entries: list[tuple[int, str]]) -> Entries:
    """By step, one a step: what falls together is planted one after the other."""
    ordered: list[tuple[int, str]] = []
    for step, blueprint in sorted(entries):
        ordered.append((max(step, ordered[-1][0] + 1) if ordered else step, blueprint))
    return tuple(ordered)


def _written(entries: Entries) -> str:
    return ",".join(f"{blueprint}@r0c{slot}:{step}" for slot, (step, blueprint) in enumerate(entries))


def _read(plan: str) -> Entries:
    parts = (entry.partition("@") for entry in plan.split(","))
    return tuple((int(place.partition(":")[2]), blueprint) for blueprint, _, place in parts)
