"""Fixture with one generated policy training, shared by several test files."""

import pytest

from esper.karn.run import Run, open_run
from esper.leyline.rows import Row
from tests.karn import made_run


@pytest.fixture(scope="session")
def training_rows() -> list[Row]:
    return made_run.training_rows(iterations=3, envs=5, horizon=12)


@pytest.fixture(scope="session")
def training(training_rows, tmp_path_factory) -> Run:
    return open_run(made_run.write(tmp_path_factory.mktemp("training") / "run", training_rows))
