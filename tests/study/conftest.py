"""Register the tiny scaling task for the tests of studies."""

from collections.abc import Iterator

import pytest

from esper.tolaria.tasks import TASKS
from tests.study.building import NAME, TASK


@pytest.fixture(autouse=True)
def tiny_scaling() -> Iterator[None]:
    TASKS[NAME] = TASK
    yield
    TASKS.pop(NAME)
