"""Count the files and functions that one small ``esper.grow`` call enters, and how often execution changes to
another file.

    PYTHONPATH=src python tools/trace_walk.py

The measured call trains the network of the README (four linear layers) for three epochs without a run
directory, on one CPU thread with rng seed 0, and plants ``mlp_small`` behind layer 1 after the first epoch.
``sys.setprofile`` reports every call of a Python function. Only named functions of the ``esper`` package are
counted: no lambdas and no comprehensions. Imports are not counted, because ``grow`` is called once before the
measurement.

To measure another checkout of Esper, set PYTHONPATH to its ``src`` folder. Result at revision c0fdec3: 41
files, 244 functions and 4,212 changes to another file. For another ``grow`` call, a review of revision
c0fdec3 counted 40 files, 230 functions and 4,617 changes to another file.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import esper


class Walk(NamedTuple):
    """Numbers of files, functions and changes to another file in one traced ``esper.grow`` call."""

    files: int
    functions: int
    changes_of_file: int
    """Number of pairs of consecutive calls whose functions are in different files."""


def grow_once() -> None:
    """Train and grow the network of the README for three epochs."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x = torch.randn(2048, 8)
    data = TensorDataset(x, x.abs().sum(dim=1, keepdim=True))
    train, validation = DataLoader(data, batch_size=16, shuffle=True), DataLoader(data, batch_size=256)
    net = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 1))
    settings = {"epochs": 3, "controller": "mlp_small@1:1", "show": lambda line: None}
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.005)
    esper.grow(net, train, validation, loss=nn.functional.mse_loss, optimizer=optimizer, **settings)


def measure() -> Walk:
    """Return the counts of files, functions and changes of file of a call of ``grow_once`` after all modules
    were imported.
    """
    grow_once()
    package = str(Path(esper.__file__).parent)
    entered: list[CodeType] = []

    def record(frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package) and not code.co_name.startswith("<"):
            entered.append(code)

    sys.setprofile(record)
    try:
        grow_once()
    finally:
        sys.setprofile(None)
    files = [code.co_filename for code in entered]
    return Walk(len(set(files)), len(set(entered)), sum(a != b for a, b in pairwise(files)))


if __name__ == "__main__":
    found = measure()
    print(f"{found.files} files, {found.functions} functions, {found.changes_of_file:,} changes of file")
