"""Files of networks that have grown: one safetensors file with the weights, and the edits as JSON.

The JSON is in the metadata of the file and contains a SHA-256 of all other bytes of the file, which was
computed with zeros in its place. A model of transformers keeps its weights in the files of transformers, and
has the edits that its configuration does not describe in ``esper.json``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Size, Tensor, nn

from esper.files.atomic_write import write_durably
from esper.kasmina.edit_list import (
    IS_BUILT,
    EditLists,
    beyond_configuration,
    check_edits,
    match_edit,
    site_of,
)
from esper.kasmina.host import Host
from esper.kasmina.older_states import FinishedGrowth, edits_of, finished_growth
from esper.kasmina.plain import blend, settle, settled_copy
from esper.kasmina.random_streams import TorchStream
from esper.kasmina.slot import SeedSlot, attach, slots_of, stop_checking
from esper.kasmina.transaction import Transaction
from esper.leyline.errors import EsperError, HostError

FORMAT: Final = 1
"""Version of the format."""
EDITS_FILE: Final = "esper.json"
"""Name of the file with edits in the folder of a model of transformers."""
_ENTRY: Final = "esper"
"""Name of the JSON in the metadata of a safetensors file."""
_NO_DIGEST: Final = b"0" * 64
_DIGEST: Final = re.compile(rb"digest\W+([0-9a-f]{64})")
_LENGTH: Final = 8
"""Number of bytes with the length of the header of a safetensors file."""

Header = dict[str, Any]
Tensors = dict[str, Tensor]


def save(net: nn.Module, path: Path) -> None:
    """Write a network with its seeds to ``path`` atomically; the seeds may be live or finished.

    Raises:
        HostError: The state dict of the network contains something other than tensors.
        SaveError: The operating system refused the write.
    """
    plain = settled_copy(net) if slots_of(net) else net
    tensors, tied = _distinct(plain)
    spec = getattr(net, "spec", None) if isinstance(net, Host) else None
    header = _header(net, edits_of(plain)) | {"spec": spec, "tied": tied}
    write_durably(path, _sealed(save_tensors(tensors, metadata={_ENTRY: json.dumps(header)})))


def save_edits(net: nn.Module, folder: Path) -> None:
    """Write the edits of a finished model of transformers that its configuration does not describe."""
    header = _header(net, beyond_configuration(edits_of(net)))
    write_durably(folder / EDITS_FILE, _sealed(json.dumps(header).encode()))


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
        EsperError: The file is not a saved network, is damaged, or has a newer format.
        HostError: The saved weights or seeds do not fit ``base``.

    Example:
        >>> net = esper.load("best.safetensors", base=Net())
    """
    header, lists, tensors = _read(path, _content)
    base = _built_in(path, header) if base is None else base
    check_base(path, base, header["class"])
    with Transaction([base]) as change:
        change.keep(base.parameters())
        build_or_refuse(path, base, lists)
        _check_tensors(path, base, tensors)
        base.load_state_dict(tensors)
    return base


def read_edits(folder: Path) -> tuple[str, EditLists]:
    """Return class and edits in the folder of a model of transformers.

    Raises:
        EsperError: The file is missing or damaged, or has a newer format.
    """
    header, lists, _ = _read(folder / EDITS_FILE, lambda content: (json.loads(content), {}))
    return header["class"], lists


def build(net: nn.Module, lists: EditLists) -> None:
    """Build the seeds of ``lists`` in a network, as plain modules with arbitrary weights."""
    for edits in lists:
        new = [edit for edit in edits if IS_BUILT not in edit]
        slots = [SeedSlot(site_of(edit), net) for edit in new]
        attach(net, slots)
        for slot, edit in zip(slots, new, strict=True):
            match_edit(slot, edit, net)
        settle(net)
        for edit in edits:
            site = site_of(edit)
            if IS_BUILT in edit and site.insertion is not None:
                block = net.get_submodule(edit["block"])
                blend(block, site.insertion.features, site.output, torch.tensor(edit["alpha"]))
    if any(lists):
        record = finished_growth(net) or FinishedGrowth(net)
        record.lists = lists
        stop_checking(net)
        record.register(net)


def check_base(path: Path | str, base: nn.Module, name: str) -> None:
    """Raise HostError unless ``base`` is a network of the class ``name`` that has not grown."""
    if name != type(base).__qualname__:
        raise HostError(f"'{path}' holds a {name}, and base is a {type(base).__qualname__}")
    if slots_of(base) or finished_growth(base) is not None:
        state = "is growing" if slots_of(base) else "has grown"
        raise HostError(f"this {name} {state} already; pass a new {name} as base")


# --- content of a file --------------------------------------------------------------------------------------


def _header(net: nn.Module, lists: EditLists) -> Header:
    start = {"digest": _NO_DIGEST.decode(), "format": FORMAT, "class": type(net).__qualname__}
    return start | {"edits": [edits for edits in lists if edits]}


def _distinct(net: nn.Module) -> tuple[Tensors, dict[str, str]]:
    """Return the tensors of a state dict, each one once, and the names of those that are left out with the
    name of the equal tensor."""
    tensors: Tensors = {}
    tied: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, value in net.state_dict().items():
        if not isinstance(value, Tensor):
            raise HostError(
                f"the state dict of {type(net).__name__} has a {type(value).__name__} under '{name}', and a"
                " file contains tensors only; save the network with torch.save(net, path)"
            )
        known = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() and known in first:
            tied[name] = first[known]
        else:
            first[known] = name
            tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    return tensors, tied


def _sealed(content: bytes) -> bytes:
    """Return ``content`` with its digest in place of zeros."""
    return content.replace(_NO_DIGEST, _digest(content), 1)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _content(file: bytes) -> tuple[Header, Tensors]:
    """Return header and tensors of a safetensors file."""
    end = _LENGTH + int.from_bytes(file[:_LENGTH], "little")
    header: Header = json.loads(json.loads(file[_LENGTH:end])["__metadata__"][_ENTRY])
    tensors = load_tensors(file)
    return header, tensors | {name: tensors[first] for name, first in header["tied"].items()}


def _read(
    path: Path | str, parse: Callable[[bytes], tuple[Header, Tensors]]
) -> tuple[Header, EditLists, Tensors]:
    """Return header, edits and tensors of a file whose digest is right and whose format is known."""
    try:
        file = Path(path).read_bytes()
        found = _DIGEST.search(file)
        start, end = found.span(1) if found is not None else (0, 0)
        if _digest(file[:start] + _NO_DIGEST + file[end:]) != file[start:end]:
            raise ValueError("wrong digest")
        header, tensors = parse(file)
        lists: EditLists = header["edits"]
        is_known = header["format"] == FORMAT
        if is_known:
            check_edits(lists)
    except Exception as error:
        raise EsperError(
            f"'{path}' is no network that this version of Esper saved, or is damaged"
            f" ({type(error).__name__}); pass a file that Grown.save or Growth.save wrote"
        ) from None
    if not is_known:
        raise EsperError(
            f"'{path}' has format {header['format']}, and this version of Esper reads format {FORMAT}; read"
            " it with the version that wrote it, or a newer one"
        )
    return header, lists, tensors


# --- a network that fits ------------------------------------------------------------------------------------


def build_or_refuse(path: Path | str, base: nn.Module, lists: EditLists) -> None:
    """Build the seeds of a file in ``base``; raise HostError if they do not fit."""
    try:
        build(base, lists)
    except EsperError:
        raise
    except Exception as error:  # torch raises several classes of exceptions for submodules that do not fit.
        raise misfit(path, base, str(error).splitlines()[-1].strip()) from None


def _check_tensors(path: Path | str, base: nn.Module, tensors: Tensors) -> None:
    """Raise HostError unless ``base`` has tensors of the same names and shapes."""
    own: dict[str, Size] = {name: value.shape for name, value in base.state_dict().items()}
    for name in sorted(own.keys() | tensors.keys()):
        if name not in tensors:
            raise misfit(path, base, f"the file has no {name}")
        if name not in own:
            raise misfit(path, base, f"it has no {name}")
        if own[name] != tensors[name].shape:
            sizes = f"{tuple(tensors[name].shape)} in the file and {tuple(own[name])} in base"
            raise misfit(path, base, f"{name} has shape {sizes}")


def misfit(path: Path | str, base: nn.Module, found: str) -> HostError:
    """Return the error for a file that does not fit ``base``, for the reason ``found``."""
    return HostError(f"'{path}' does not fit this {type(base).__qualname__}: {found}")


def _built_in(path: Path | str, header: Header) -> nn.Module:
    from esper.kasmina.hosts import HOSTS  # noqa: PLC0415  only for networks of built-in classes

    name, spec = header["class"], header["spec"]
    kinds = {kind.__qualname__: kind for kind in HOSTS.values()}
    if spec is None or name not in kinds:
        raise HostError(f"'{path}' holds a {name}, which is no built-in host; pass base=, a new {name}")
    with TorchStream(0):  # The saved weights overwrite the new host's weights.
        return kinds[name](**spec)
