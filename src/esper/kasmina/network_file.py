"""Files that store a growing network: weights, seeds and sites as plain tensors and values."""

from __future__ import annotations

import io
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from esper.files.atomic_write import write_durably
from esper.kasmina.host import Host
from esper.kasmina.network import MorphogeneticModel
from esper.kasmina.plain import finish
from esper.kasmina.random_streams import TorchStream
from esper.kasmina.sites import Output, Site
from esper.kasmina.slot import SeedSlot, attach, detach
from esper.leyline.errors import EsperError, HostError

FORMAT: Final = 1


def network_state(network: MorphogeneticModel) -> dict[str, Any]:
    """Return class, constructor arguments of a built-in host, sites and weights, for ``load``."""
    host = network.host
    return {
        "format": FORMAT,
        "class": type(host).__qualname__,
        "spec": getattr(host, "spec", None) if isinstance(host, Host) else None,
        "sites": [asdict(site) | {"output": list(site.output)} for site in network.sites],
        "state": {name: value.clone() for name, value in host.state_dict().items()},
    }


def save(state: dict[str, Any], path: Path) -> None:
    """Write plain values and tensors to ``path`` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_durably(path, buffer.getvalue())


def load(path: Path | str, *, base: nn.Module | None = None) -> nn.Module:
    """Read a network that was saved with its seeds and return it as a plain module.

    Args:
        path: File that ``Grown.save``, ``Growth.save`` or a run wrote.
        base: New network of the same class and sizes, without seeds; not needed for a built-in host.

    Returns:
        ``base`` with the saved weights and seeds; an error leaves ``base`` unchanged.

    Raises:
        EsperError: The file is not a saved network.
        HostError: The file does not fit ``base``.

    Example:
        >>> net = esper.load("best.pt", base=Net())
    """
    try:
        with warnings.catch_warnings():
            # torch.load warns about pickles of other programs before it refuses them.
            warnings.simplefilter("ignore")
            saved = torch.load(Path(path), map_location="cpu", weights_only=True)
        sites = [_site(entry) for entry in saved["sites"]]
        state, name, spec = dict(saved["state"]), saved["class"], saved["spec"]
    # torch.load raises many exception classes for other files, IndexError among them.
    except Exception as error:
        raise EsperError(
            f"'{path}' is no network that esper saved ({type(error).__name__}); pass a file that"
            " Grown.save wrote"
        ) from None
    if base is None:
        base = _built_in(path, name, spec)
    if name != type(base).__qualname__:
        raise HostError(f"'{path}' holds a {name}, and base is a {type(base).__qualname__}")
    try:
        slots = [SeedSlot(site, base) for site in sites]
    except AttributeError as error:  # The submodule of a slot is missing in the base network.
        raise _misfit(path, base, error) from None
    attach(base, slots)
    # load_state_dict copies the tensors that fit before it raises for the others.
    before = {name: value.clone() for name, value in base.state_dict().items()}
    try:
        base.load_state_dict(state)
        finish(base)
    except BaseException as error:  # The base network stays unchanged after Ctrl-C as well.
        detach(base)
        base.load_state_dict(before)
        if isinstance(error, RuntimeError):
            raise _misfit(path, base, error) from None
        raise
    return base


def _misfit(path: Path | str, base: nn.Module, error: Exception) -> HostError:
    found = str(error).splitlines()[-1].strip()
    return HostError(f"'{path}' does not fit this {type(base).__qualname__}: {found}")


def _built_in(path: Path | str, name: str, spec: dict[str, Any] | None) -> nn.Module:
    from esper.kasmina.hosts import HOSTS  # noqa: PLC0415  only for networks of built-in classes

    kinds = {kind.__qualname__: kind for kind in HOSTS.values()}
    if spec is None or name not in kinds:
        raise HostError(f"'{path}' holds a {name}, which is no built-in host; pass base=, a new {name}")
    with TorchStream(0):  # The initial weights are overwritten by the saved weights.
        return kinds[name](**spec)


def _site(entry: dict[str, Any]) -> Site:
    swap = entry["swap"] and tuple(entry["swap"])
    return Site(**entry | {"output": Output(*entry["output"]), "shape": tuple(entry["shape"]), "swap": swap})
