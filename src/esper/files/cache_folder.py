"""Location of the cache: files that can be recomputed, such as twin scores and compiled kernels."""

import os
import tempfile
from pathlib import Path

CACHE_VARIABLE = "ESPER_CACHE"


def cache_folder(name: str) -> Path:
    """Return the path of the cache folder ``name``, which may not exist yet.

    The environment variable ``ESPER_CACHE`` names the parent folder; the default is ``~/.cache/esper``.
    """
    base = os.environ.get(CACHE_VARIABLE)
    try:
        return Path(base or Path.home() / ".cache" / "esper") / name
    except RuntimeError:  # Path.home fails for a user without a home directory.
        return Path(tempfile.gettempdir()) / "esper" / name
