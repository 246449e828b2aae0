"""Import time of leyline and tamiyo, and rng seeds that are derived for named random streams."""

import subprocess
import sys

import pytest

from esper.leyline import derive_seed

_CHILD = """
import sys, time
start = time.process_time()
import {package}
print(time.process_time() - start)
print(*sorted(name for name in sys.modules if name in ("torch", "esper.kasmina", "esper.tolaria")))
"""


@pytest.mark.parametrize("package", ["esper.leyline", "esper.tamiyo"])
def test_import_of_leyline_and_tamiyo_is_fast_and_does_not_import_torch(package: str) -> None:
    child = subprocess.run(
        [sys.executable, "-c", _CHILD.format(package=package)], capture_output=True, text=True, check=True
    )
    seconds, heavy = child.stdout.split("\n")[:2]
    assert heavy == ""
    assert float(seconds) < 3.0, "CPU seconds; usually about 0.3"


def test_rng_seeds_of_named_random_streams_do_not_change_between_versions() -> None:
    # The derived rng seed is the first 8 bytes of SHA-256 of "rng_seed/name/name", read little-endian and
    # halved.
    assert derive_seed(0) == 2033344993903900207
    assert derive_seed(7, "env", 3, "episode", 0, "decider") == 8395582433212906931


def test_rng_seeds_of_random_streams_differ_if_any_part_of_the_stream_name_differs() -> None:
    names = [(0, "a", 1), (1, "a", 1), (0, "b", 1), (0, "a", 2), (0, "a"), (0, 1, "a")]
    seeds = {derive_seed(rng_seed, *rest) for rng_seed, *rest in names}
    assert len(seeds) == len(names)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_import_of_the_controller_registry_imports_no_controller_module() -> None:
    code = "import sys, esper.tamiyo.controller_registry; print(*sys.modules)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = [name for name in child.stdout.split() if name.startswith("esper.tamiyo")]
    assert loaded == ["esper.tamiyo", "esper.tamiyo.controller_registry"]
