"""Location of the cache: files that can be recomputed, such as twin scores and compiled kernels."""

import os
import tempfile
from pathlib import Path

CACHE_VARIABLE = "ESPER_CACHE"


def cache_folder(name: str) -> Path:
    """Return the cache folder ``name``; it may not exist yet.

    ``ESPER_CACHE`` names the parent folder; the default is ``~/.cache/esper``.
    """
    base = os.environ.get(CACHE_VARIABLE)
    try:
        return Path(base or Path.home() / ".cache" / "esper") / name
    except RuntimeError:  # the user has no home directory
        return Path(tempfile.gettempdir()) / "esper" / name
