"""Fixtures: the task "tiny", and training runs on this task that all tests of a file share."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from esper.run.policy_training import train
from tests.integration.training import Refused, StoppedError, after_iterations, prepare, sentence_of, tiny


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Register the task "tiny" and return the folder of cached twin scores, shared by all tests of a file."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        prepare(folder, patch)
        yield folder


@pytest.fixture(scope="module")
def undisturbed(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    train(tiny(), out)
    return out


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    return lambda *words: sentence_of(capsys, *words)


@pytest.fixture(scope="module")
def stopped_run(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a training stopped in iteration 3, after its telemetry rows and before its checkpoint."""
    out = tmp_path_factory.mktemp("stopped") / "run"

    def stop(iteration: int) -> None:
        if iteration == 3:
            raise StoppedError

    with pytest.raises(StoppedError), after_iterations(stop):
        train(tiny(), out)
    return out


@pytest.fixture
def stopped(stopped_run: Path, tmp_path: Path) -> Path:
    """Return a copy of the stopped run, to be damaged or resumed."""
    shutil.copytree(stopped_run, tmp_path / "run")
    return tmp_path / "run"
