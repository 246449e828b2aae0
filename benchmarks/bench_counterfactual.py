"""Cost of scoring all eight on/off configurations of three seeds, as a multiple of one validation forward
pass.
"""

from collections import deque

import pytest
import torch

from benchmarks.timing import cpu_times, ratio
from esper.kasmina.configurations import outputs_by_prefix
from esper.leyline import BlueprintAction
from tests.tolaria.building import cnn, digits, every_choice, grown_model, measured_on

SLOTS = (0, 1, 2)
LIMIT = 2.5


@pytest.mark.parametrize(
    ("task", "widths", "kernel"), [("digits_impaired", (2, 4, 8), 1), ("digits", (4, 8, 8), 3)]
)
def bench_all_configurations_of_three_heavy_seeds(task: str, widths: tuple[int, ...], kernel: int) -> None:
    model, _ = grown_model(dict.fromkeys(SLOTS, BlueprintAction.CONV_HEAVY), host=cnn(widths, kernel))
    model.eval()
    x, y = digits(360)
    choices = every_choice(3)

    @torch.inference_mode()
    def all_on() -> torch.Tensor:
        return model(x)

    times = cpu_times(
        {
            "all-on forward": all_on,
            "8 configurations": lambda: deque(outputs_by_prefix(model, x, SLOTS, choices), maxlen=0),
            "8 configurations scored": lambda: measured_on(model, x, y, SLOTS),
        },
        repeats=20,
    )
    ratio(task, times, "8 configurations scored", "all-on forward")
    ratio(task, times, "8 configurations", "all-on forward", at_most=LIMIT)
