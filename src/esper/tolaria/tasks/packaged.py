"""Reader of the data files that Esper contains; scaling_data.md states their origin."""

import io
import lzma
from functools import cache
from importlib.resources import files

import numpy as np
from torch import Tensor, from_numpy


@cache
def packaged(name: str) -> dict[str, Tensor]:
    """Return the arrays of the packaged file ``name``.npz.xz as tensors; whole numbers, images as stored."""
    content = lzma.decompress(files("esper.tolaria.tasks").joinpath(f"{name}.npz.xz").read_bytes())
    with np.load(io.BytesIO(content)) as archive:
        return {key: from_numpy(archive[key]) for key in archive.files}
