"""Cache of the do-nothing twins' scores in a temporary folder, shared by all tests of a process."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ESPER_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield
