"""Damaged files of every kind are read or refused with an error of Esper; nothing else changes."""

from pathlib import Path

import pytest

from esper.tolaria.tasks import TASKS
from tests.integration.damaged_files import KINDS, check_damaged, write_originals
from tests.study import building

DAMAGED = 12
"""Number of damaged files of each kind."""


@pytest.fixture(scope="module")
def originals(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged") / "originals"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, building.NAME, building.TASK)
        write_originals(folder)
    return folder


@pytest.mark.filterwarnings("ignore::esper.growth.GrowthWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_read_or_refused_with_an_error_of_esper(
    kind: str, originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TASKS, building.NAME, building.TASK)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    refused = check_damaged(KINDS[kind], originals, tmp_path / "damaged", DAMAGED)
    assert 0 < refused <= DAMAGED
