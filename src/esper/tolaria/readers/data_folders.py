"""Search for data sets in $ESPER_DATA, then in the shared data folders of the system."""

import os
from pathlib import Path
from typing import Final

from esper.leyline.errors import DataError
from esper.tolaria.readers.files import open_file, refusals

DEFAULT_DATA_DIRS: Final = "/usr/local/share:/usr/share"


def find_data(name: str, hint: str) -> Path:
    """Return the path of the file or folder ``name`` in the first data folder that has it.

    Args:
        name: Name of the data set.
        hint: Instruction how to install the data set, for the error message.

    Raises:
        DataError: No data folder has the data set, or the data set may not be read.
    """
    places = _places(name)
    for place in places:
        if _is_there(place, name):
            return place
    unset = "" if os.environ.get("ESPER_DATA") else " ($ESPER_DATA is not set)"
    looked = ", ".join(f"'{place}'" for place in places) or "no place at all"
    raise DataError(f"the data set {name} is missing; looked at {looked}{unset}: {hint}")


def _places(name: str) -> list[Path]:
    """Return the paths at which the data set ``name`` is searched, in order.

    By the XDG standard, relative folders in ``XDG_DATA_DIRS`` are ignored.
    """
    own = os.environ.get("ESPER_DATA")
    shared = os.environ.get("XDG_DATA_DIRS") or DEFAULT_DATA_DIRS
    entries = [Path(entry) for entry in shared.split(":")]
    places = [entry / "datasets" / name for entry in entries if entry.is_absolute()]
    return [Path(own) / name, *places] if own else places


def _is_there(place: Path, name: str) -> bool:
    """Return whether the data set exists; raise DataError if it exists but cannot be read."""
    with refusals(place, f"the data set {name}"):
        try:
            if place.is_dir():
                os.listdir(place)
            else:
                open_file(place).close()
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True
