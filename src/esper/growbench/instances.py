"""Instances of GrowBench, and the plans of growth that are recorded for each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import msgspec
import numpy as np

from esper.kasmina.birth import Births
from esper.leyline import EsperError
from esper.tolaria.tasks import TaskSpec, task_named

STEPS: Final = 40
"""Number of training steps of an episode; each spends an equal share of the budget."""
DECISION_POINTS: Final = (0, 2, 3, 5, 7, 10, 14, 18, 22, 26)
"""Steps before which a block can be inserted; the learning rate decays from step 32 on."""
MOST_BLOCKS: Final = 4
"""Largest number of blocks that a plan inserts."""
DRAWN_FROM: Final = 570
"""Rng seed of the instances and of their random plans."""
RNG_SEEDS: Final = (1_002_700, 1_002_701)
"""Rng seeds of the trainings of every instance."""
CLOCKS: Final = {"1.5": (2, 3, 5, 7), "1.8": (2, 5, 7, 14), "2.2": (2, 5, 10, 22), "3": (2, 7, 18)}
"""Plans that insert a block at every multiple of the compute, rounded up to a decision point."""
RANDOM_PLANS: Final = 5

OPERATOR: Final = Births(zero=True)
"""How a block is inserted (docs/adr/0057)."""

Plan = tuple[int, ...]
"""Decision points at which a block is inserted, ascending."""


class Family(msgspec.Struct, frozen=True):
    """Tasks of one kind of network, and the values from which an instance is drawn."""

    tasks: tuple[str, ...]
    widths: tuple[int, ...]
    rates: tuple[float, ...]
    batch_sizes: tuple[int, ...]
    budget: int
    """Largest budget in FLOPs at width ``widths[-1]``; instances have down to a 32nd of it."""


FAMILIES: Final = {
    "gpt": Family(("pycode_scaling", "prose_scaling"), (16, 24), (2e-3, 4e-3, 8e-3), (8, 16), 4 * 10**11),
    "cnn": Family(("clothes14_scaling",), (4, 8), (2e-3, 4e-3), (16, 32, 64), 15 * 10**10),
    "mlp": Family(("teacher_scaling", "diamonds_scaling"), (16, 32), (2e-3, 6e-3), (64, 128), 18 * 10**9),
    "vit": Family(("vit_scaling",), (16, 24), (1e-3, 3e-3), (8, 16), 10 * 10**10),
    "gru": Family(("gru_scaling",), (24, 32), (2e-3, 4e-3, 8e-3), (8, 16), 10 * 10**10),
}
"""Families of GrowBench; tasks that are held out are in none."""


class GrowthInstance(msgspec.Struct, frozen=True):
    """Task with one width, learning rate, batch size, share of the data, and budget."""

    instance: int
    family: str
    task: str
    width: int
    rate: float
    batch_size: int
    data_share: float
    budget: int
    """Compute budget in FLOPs."""

    def task_spec(self) -> TaskSpec:
        """Return the task of the instance."""
        task = replace(task_named(self.task), horizon=STEPS).with_slots(MOST_BLOCKS)
        return task.with_instance(
            width=self.width,
            learning_rate=self.rate,
            batch_size=self.batch_size,
            data_share=self.data_share,
            budget=self.budget,
        )


def instance(number: int) -> GrowthInstance:
    """Return the instance ``number``; families alternate, so that the first instances are balanced."""
    if number < 0:
        raise EsperError(f"the number of an instance is {number}; count from 0")
    name = list(FAMILIES)[number % len(FAMILIES)]
    family, rng = FAMILIES[name], np.random.default_rng([DRAWN_FROM, number])
    width = int(rng.choice(family.widths))
    # The FLOPs of a sample grow with the square of the width, so all widths see similar numbers of samples.
    budget = family.budget * (width / family.widths[-1]) ** 2 * 2.0 ** -rng.uniform(0, 5)
    return GrowthInstance(
        number,
        name,
        str(rng.choice(family.tasks)),
        width,
        float(rng.choice(family.rates)),
        int(rng.choice(family.batch_sizes)),
        float(rng.choice([1.0, 1.0, 0.3, 0.1])),
        round(budget),
    )


def plans_of(number: int) -> list[Plan]:
    """Return the recorded plans of an instance: never, every single time, clocks, and random ones."""
    plans: list[Plan] = [(), *((step,) for step in DECISION_POINTS), *CLOCKS.values(), (0, 2)]
    rng = np.random.default_rng([DRAWN_FROM, number, 1])
    while len(plans) < 1 + len(DECISION_POINTS) + len(CLOCKS) + 1 + RANDOM_PLANS:
        chosen = rng.choice(DECISION_POINTS, rng.integers(2, MOST_BLOCKS + 1), replace=False)
        plan = tuple(sorted(map(int, chosen)))
        if plan not in plans:
            plans.append(plan)
    return plans
