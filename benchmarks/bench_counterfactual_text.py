"""Cost of scoring all eight on/off configurations of three seeds in the GPT of task ``pycode``, as a multiple
of one forward pass.
"""

from collections import deque

import pytest
import torch

from benchmarks.timing import cpu_times, ratio
from esper.kasmina.configurations import outputs_by_prefix
from esper.kasmina.contributions import measure, score_samples
from esper.leyline import TRANSFORMER_BLUEPRINTS, BlueprintAction
from esper.tolaria.tasks.spec import NEXT_TOKEN
from esper.tolaria.tasks.text import PYCODE
from tests.tolaria.building import every_choice, grown_model

SLOTS = (0, 1, 2)
# The blueprint FLEX_ATTENTION is left out, because on CPUs it is computed like ATTENTION.
SEEDS = sorted(TRANSFORMER_BLUEPRINTS - {BlueprintAction.FLEX_ATTENTION})
LIMIT = 3.0


@pytest.mark.parametrize("seed", SEEDS)
def bench_all_configurations_of_three_seeds(seed: BlueprintAction) -> None:
    """Measure the cost of scoring all eight on/off configurations of three seeds of one blueprint. As a
    multiple of one forward pass, scoring costs most for small seeds, because the output layer runs eight
    times.
    """
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
            "8 configurations scored": lambda: measure(
                SLOTS,
                score_samples(
                    model, samples.x, samples.y, NEXT_TOKEN.sample_scores, NEXT_TOKEN.sample_losses
                ),
            ),
        },
        repeats=1,
        iterations=40,
    )
    title = f"pycode, {seed.name}"
    ratio(title, times, "8 configurations scored", "all-on forward")
    ratio(title, times, "8 configurations", "all-on forward", at_most=LIMIT)
