"""A network with seeds on disk: plain tensors and words, and back from them into a new one of its class."""

from __future__ import annotations

import io
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from esper.files.atomic_write import write_durably
from esper.growth import finishing
from esper.growth.growth import Growth
from esper.growth.sites import Output, Site
from esper.growth.slot import attach, detach
from esper.leyline.errors import EsperError, HostError


def state_of(growth: Growth) -> dict[str, Any]:
    """What ``load`` needs: weights, places, and the sample that the result is compared on."""
    state = {name: value.clone() for name, value in growth.net.state_dict().items()}
    sites = [asdict(site) | {"output": list(site.output)} for site in growth.sites]
    return {"class": type(growth.net).__qualname__, "state": state, "sites": sites, "sample": growth.sample}


def save(saved: dict[str, Any], path: Path) -> None:
    """Write it, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write(saved, path)


def write(content: dict[str, Any], path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_durably(path, buffer.getvalue())


def load(path: Path | str, *, base: nn.Module) -> nn.Module:
    """The network that ``save`` wrote, also a half-grown one, as a plain module: ``base`` with its seeds.

    ``base`` is a new network of the same class and sizes, without seeds.
    """
    try:
        saved = torch.load(Path(path), weights_only=True)
        sites = [_site(entry) for entry in saved["sites"]]
    except (OSError, RuntimeError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
        raise EsperError(
            f"'{path}' is no network that esper saved ({type(error).__name__}); pass a file that"
            " Grown.save wrote"
        ) from None
    if saved["class"] != type(base).__qualname__:
        raise HostError(f"'{path}' holds a {saved['class']}, and base is a {type(base).__qualname__}")
    attach(base, sites, saved["sample"])
    try:
        base.load_state_dict(saved["state"])
        finishing.finish(base, saved["sample"], merge=False, leave=lambda _: None)
    except RuntimeError as error:
        detach(base)
        raise HostError(
            f"'{path}' does not fit this {type(base).__qualname__}: {str(error).splitlines()[-1].strip()}"
        ) from None
    return base


def _site(entry: dict[str, Any]) -> Site:
    return Site(**entry | {"output": Output(*entry["output"]), "shape": tuple(entry["shape"])})
