"""Files that store a growing network: weights, seeds and sites as plain tensors and values."""

from __future__ import annotations

import io
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from esper.files.atomic_write import write_durably
from esper.kasmina.block_notes import weights_of
from esper.kasmina.edits import Insertion
from esper.kasmina.feature_output import Output
from esper.kasmina.graft import BlockGraft
from esper.kasmina.host import Host
from esper.kasmina.network import MorphogeneticModel
from esper.kasmina.plain import finish
from esper.kasmina.random_streams import TorchStream
from esper.kasmina.sites import Site
from esper.kasmina.slot import SeedSlot, attach, stop_checking
from esper.kasmina.transaction import Transaction
from esper.kasmina.widening import Pair, WidthGraft
from esper.leyline.errors import EsperError, HostError

FORMAT: Final = 1
_FOLDER: Final = 0x10
"""Flag of a zip entry that is a folder."""


def network_state(network: MorphogeneticModel) -> dict[str, Any]:
    """Return everything that ``load`` needs: class, constructor arguments of a built-in host, sites, and
    weights."""
    host = network.host
    return {
        "format": FORMAT,
        "class": type(host).__qualname__,
        "spec": getattr(host, "spec", None) if isinstance(host, Host) else None,
        "sites": [_plain_site(slot) for slot in network.slots],
        "blocks": {
            slot.site.name: slot.graft.description
            for slot in network.slots
            if isinstance(slot.graft, BlockGraft)
        },
        "state": weights_of(host),
    }


def save(state: dict[str, Any], path: Path) -> None:
    """Write a nested dict of plain values and tensors to ``path`` atomically."""
    write_durably(path, encoded(state))


def encoded(state: dict[str, Any]) -> bytes:
    """Return the content of the file that ``torch.save`` writes for ``state``."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def read(path: Path, map_location: str | None = None) -> Any:
    """Return the content of a file that ``save`` wrote.

    For a file that is damaged or has another format, torch and zipfile raise many classes of exceptions, even
    IndexError.
    """
    with zipfile.ZipFile(path) as archive:
        # torch.load ignores checksums, and reads arbitrary values for an entry that is marked as a folder.
        folders = any(entry.external_attr & _FOLDER for entry in archive.infolist())
        if folders or archive.testzip() is not None:
            raise zipfile.BadZipFile
    return torch.load(path, map_location=map_location, weights_only=True)


def load(path: Path | str, *, base: nn.Module | None = None) -> nn.Module:
    """Read a network that was saved with its seeds and return it as a plain module.

    Args:
        path: File that ``Grown.save``, ``Growth.save`` or a command such as ``esper run`` wrote.
        base: New network of the same class and layer sizes as the saved one, without seeds; not needed for a
            built-in host.

    Returns:
        The network with the saved weights and seeds: ``base`` or a new built-in host; after an error ``base``
        is unchanged.

    Raises:
        EsperError: The file is not a saved network.
        HostError: The saved weights or seeds do not fit ``base``.

    Example:
        >>> net = esper.load("best.pt", base=Net())
    """
    try:
        saved = read(Path(path), map_location="cpu")
        sites = [_site(entry) for entry in saved["sites"]]
        state, name, spec = dict(saved["state"]), saved["class"], saved["spec"]
        blocks = dict(saved.get("blocks", {}))
    except Exception as error:
        raise EsperError(
            f"'{path}' is no network that esper saved, or is damaged ({type(error).__name__}); pass a file"
            " that Grown.save wrote"
        ) from None
    if base is None:
        base = _built_in(path, name, spec)
    if name != type(base).__qualname__:
        raise HostError(f"'{path}' holds a {name}, and base is a {type(base).__qualname__}")
    try:
        with Transaction([base]) as change:
            change.keep(base.parameters())
            slots = [SeedSlot(site, base) for site in sites]
            attach(base, slots)
            for slot in slots:
                slot.match(blocks.get(slot.site.name), None)
            stop_checking(base)  # A state of other blocks is refused below, in the words of torch.
            base.load_state_dict(state)
            finish(base)
    except EsperError:
        raise
    except Exception as error:  # torch raises several classes of exceptions for a state that does not fit.
        raise _misfit(path, base, error) from None
    return base


def _misfit(path: Path | str, base: nn.Module, error: Exception) -> HostError:
    found = str(error).splitlines()[-1].strip()
    return HostError(f"'{path}' does not fit this {type(base).__qualname__}: {found}")


def _built_in(path: Path | str, name: str, spec: dict[str, Any] | None) -> nn.Module:
    from esper.kasmina.hosts import HOSTS  # noqa: PLC0415  only for networks of built-in classes

    kinds = {kind.__qualname__: kind for kind in HOSTS.values()}
    if spec is None or name not in kinds:
        raise HostError(f"'{path}' holds a {name}, which is no built-in host; pass base=, a new {name}")
    with TorchStream(0):  # The saved weights overwrite the new host's weights.
        return kinds[name](**spec)


def _plain_site(slot: SeedSlot) -> dict[str, Any]:
    site, is_widened = slot.site, isinstance(slot.graft, WidthGraft)
    insertion = site.insertion and site.insertion.plain()
    pair = site.pair.plain() if site.pair is not None and is_widened else None
    return asdict(site) | {"output": list(site.output), "insertion": insertion, "pair": pair}


def _site(entry: dict[str, Any]) -> Site:
    swap = entry["swap"] and tuple(entry["swap"])
    insertion = entry.get("insertion") and Insertion.of(entry["insertion"])
    pair = entry.get("pair") and Pair.of(entry["pair"])
    parts = {"output": Output(*entry["output"]), "shape": tuple(entry["shape"])}
    return Site(**entry | parts | {"swap": swap, "insertion": insertion, "pair": pair})
