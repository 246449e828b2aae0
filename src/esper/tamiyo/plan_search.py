"""Evolutionary search for the best plan of germinations: random plans, then mutations of the best plans.

The caller trains a network with each plan; ``propose`` returns new plans, given the losses of earlier plans.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np

from esper.leyline import ActionSpace, derive_seed

GENERATIONS: Final = 4
PARENTS: Final = 3
"""Number of best plans (lowest loss) that are mutated into new plans."""

Entries = tuple[tuple[int, str], ...]
"""Plan as pairs (step, blueprint) in order of steps; slots are filled upstream first."""


def propose(known: Mapping[str, float], count: int, space: ActionSpace, last: int) -> list[str]:
    """Return up to ``count`` new plans as text; equal arguments give equal plans.

    Args:
        known: Losses of the plans evaluated so far, by the text of the plan.
        count: Number of plans; fewer are returned if the search finds no more new plans.
        space: Action space of the host.
        last: All germinations are at steps below ``last``.
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
    """Draw a plan: a random number of seeds of one blueprint, at steps uniform on a logarithmic scale."""
    blueprint, count = _blueprint(rng, space), rng.integers(1, space.slot_config.num_slots + 1)
    return _ordered([(_step(rng, last), blueprint) for _ in range(count)])


def _changed(entries: Entries, rng: np.random.Generator, space: ActionSpace, last: int) -> Entries:
    """Mutate a plan: move a germination to another step, change its blueprint, remove it or add another."""
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
    """Sort germinations by step; if several have the same step, all but the first move to later steps."""
    ordered: list[tuple[int, str]] = []
    for step, blueprint in sorted(entries):
        ordered.append((max(step, ordered[-1][0] + 1) if ordered else step, blueprint))
    return tuple(ordered)


def _written(entries: Entries) -> str:
    return ",".join(f"{blueprint}@r0c{slot}:{step}" for slot, (step, blueprint) in enumerate(entries))


def _read(plan: str) -> Entries:
    parts = (entry.partition("@") for entry in plan.split(","))
    return tuple((int(place.partition(":")[2]), blueprint) for blueprint, _, place in parts)
