"""A small recording of two families, made once."""

from pathlib import Path

import pytest

from esper.growbench.instances import GrowthInstance, Plan
from esper.growbench.recording import record

PLANS: list[Plan] = [(), (0,), (0, 2), (2,), (2, 5), (5,), (14,)]
SMALL = [
    GrowthInstance(0, "one", "teacher_scaling", 8, 6e-3, 64, 0.1, 5 * 10**6),
    GrowthInstance(1, "two", "diamonds_scaling", 8, 6e-3, 64, 0.3, 8 * 10**6),
]


@pytest.fixture(scope="session")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recording")
    record(folder, SMALL, plans=lambda number: PLANS)
    return folder
