"""What it costs to score every on/off choice of three seeds in the GPT of ``pycode``, in plain forwards."""

from collections import deque

import pytest
import torch

from benchmarks.measuring import cpu_times, ratio
from esper.leyline import TRANSFORMER_BLUEPRINTS, BlueprintAction
from esper.tolaria.counterfactual import measure
from esper.tolaria.objective import NEXT_TOKEN
from esper.tolaria.switching import outputs_by_prefix
from esper.tolaria.tasks.text import PYCODE
from tests.tolaria.building import every_choice, grown_model

SLOTS = (0, 1, 2)
SEEDS = sorted(TRANSFORMER_BLUEPRINTS - {BlueprintAction.FLEX_ATTENTION})  # which is ATTENTION on a CPU
LIMIT = 3.0


@pytest.mark.parametrize("seed", SEEDS)
def bench_all_configurations_of_three_seeds(seed: BlueprintAction) -> None:
    """The lighter the seeds, the more weighs the output layer, which runs for all eight."""
    stream = torch.Generator().manual_seed(0)
    host = PYCODE.build_host(PYCODE.instances.draw(stream))
    model, _ = grown_model(dict.fromkeys(SLOTS, seed), host=host)
    model.eval()
    samples = PYCODE.load(stream).validation
    choices = every_choice(3)

    @torch.inference_mode()
    def all_on() -> torch.Tensor:
        return model(samples.x)

    def configurations() -> None:
        deque(outputs_by_prefix(model, samples.x, SLOTS, choices), maxlen=0)

    times = cpu_times(
        {
            "all-on forward": all_on,
            "8 configurations": configurations,
            "8 configurations scored": lambda: measure(model, samples.x, samples.y, SLOTS, NEXT_TOKEN),
        },
        repeats=1,
        iterations=40,
    )
    title = f"pycode, {seed.name}"
    ratio(title, times, "8 configurations scored", "all-on forward")
    ratio(title, times, "8 configurations", "all-on forward", at_most=LIMIT)
