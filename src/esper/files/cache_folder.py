"""Where things are kept that can be made again."""

import os
import tempfile
from pathlib import Path

CACHE_VARIABLE = "ESPER_CACHE"


def cache_folder(name: str) -> Path:
    """A folder for things of one kind; it may not exist yet."""
    base = os.environ.get(CACHE_VARIABLE)
    try:
        return Path(base or Path.home() / ".cache" / "esper") / name
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / "esper" / name
