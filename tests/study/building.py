"""A small scaling task, and configurations of studies on that task."""

from dataclasses import replace
from typing import Any

from esper.run.run_config import checked
from esper.study.study_config import StudyConfig
from esper.tolaria.data import GuardedTest, Samples, Splits
from esper.tolaria.tasks import task_named
from esper.tolaria.tasks.text import split_text

NAME = "tiny_scaling"
TEXT = b"".join(b"%d %d\n" % (n, n * n) for n in range(3500))


def few(splits: Splits) -> Splits:
    """Return data splits of the text with only 16 test windows."""
    splits.test.unlock()
    test = splits.test.read()
    return replace(splits, test=GuardedTest(Samples(test.x[:16], test.y[:16])))


TASK = replace(
    task_named("pycode_scaling"),
    name=NAME,
    load=lambda generator: few(split_text(TEXT, 64, generator, validation=16)),
    digest=lambda: "numbers and their squares",
    batch_size=2,
    budget=1_500_000_000,
    horizon=10,
    warmup=4,
).with_slots(2)
"""Tiny scaling task; a minibatch costs 16.3, 29.4 or 42.5 MFLOP for hosts of one, two or three blocks."""


def study(**changes: Any) -> StudyConfig:
    """Return the configuration of a study on the tiny task."""
    settings = {
        "tasks": [NAME],
        "arms": ["static"],
        "marks": [0.5, 1.0],
        "rng_seeds": 2,
        "selection_rng_seeds": 1,
        "learning_rate_factors": [1.0],
    }
    return checked(StudyConfig, {**settings, **changes})
