"""Out of Esper: a plain module with the fossils built in, and the same on disk.

The host becomes an ``nn.Sequential``, with every fossil placed behind the segment it grew on.
"""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from esper.kasmina import blend
from esper.kasmina.blueprints import blueprint_named, names_for
from esper.kasmina.hosts import CNNHost, Host, ResidualHost, TransformerHost
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.streams import TorchStream
from esper.leyline.errors import EsperError, HostError, UnknownNameError
from esper.leyline.factored_actions import BLEND_IDS, STYLE_OPERATORS, BlendOperator
from esper.leyline.stages import Stage

TOPOLOGY_FILE = "topology.json"
WEIGHTS_FILE = "weights.safetensors"
_HOSTS: dict[str, type[CNNHost] | type[ResidualHost] | type[TransformerHost]] = {
    "cnn": CNNHost,
    "residual": ResidualHost,
    "gpt": TransformerHost,
}
"""Hosts that can be built again from what they were built with."""


class Fossil(nn.Module):
    """A seed that became part of the network: ``h + change(h)``."""

    def __init__(self, seed: nn.Module, gate: nn.Module | None, operator: BlendOperator) -> None:
        super().__init__()
        self.seed = seed
        self.gate = gate
        self.operator = operator

    def forward(self, h: Tensor) -> Tensor:
        return h + blend.change(self.operator, h, self.seed, self.gate)


def harvest(model: MorphogeneticModel) -> nn.Module:
    """A plain module, independent of ``model``, that computes what host and fossils compute.

    Seeds that are not fossilized are left behind; commit them first.
    """
    grown = copy.deepcopy(model)
    fossils = {}
    for index in np.flatnonzero(grown.table.stage[0] == Stage.FOSSILIZED).tolist():
        slot = grown.slot(index)
        assert slot.seed is not None, f"slot {slot.slot_id} is marked as fossilized but empty"
        fossils[index] = Fossil(slot.seed, slot.gate, slot.operator)
    return _chain(grown.host, fossils)


def _chain(host: Host, fossils: dict[int, Fossil]) -> nn.Sequential:
    chain = nn.Sequential()
    for index, segment in enumerate(host.segments):
        chain.add_module(f"segment_{index}", segment)
        if index in fossils:
            chain.add_module(f"fossil_{host.slot_config.slot_ids[index]}", fossils[index])
    return chain


def save_committed(model: MorphogeneticModel, directory: Path) -> None:
    """Write the committed network: what to build as JSON, the weights as safetensors."""
    host = model.host
    if not isinstance(host, CNNHost | ResidualHost | TransformerHost):
        raise HostError(
            f"only built-in hosts can be rebuilt from a file; {type(host).__name__} is yours:"
            " use harvest(model) and save its state_dict"
        )
    names = names_for(host.topology)
    fossils = [
        {
            "slot": model.slot_config.slot_ids[index],
            "index": index,
            "blueprint": names[int(model.table.blueprint[0, index])],
            "style": BLEND_IDS[int(model.table.style[0, index])],
        }
        for index in np.flatnonzero(model.table.stage[0] == Stage.FOSSILIZED).tolist()
    ]
    directory.mkdir(parents=True, exist_ok=True)
    # Clones: a tied embedding stands twice in the dictionary, and shared memory is not saved.
    weights = {
        name: value.clone(memory_format=torch.contiguous_format)
        for name, value in harvest(model).state_dict().items()
    }
    save_file(weights, directory / WEIGHTS_FILE)
    kind = next(name for name, built in _HOSTS.items() if isinstance(host, built))
    topology = {"host": kind, "spec": host.spec, "fossils": fossils}
    (directory / TOPOLOGY_FILE).write_text(json.dumps(topology, indent=2) + "\n")


def load_committed(directory: Path | str) -> nn.Module:
    """The plain module that ``save_committed`` wrote."""
    directory = Path(directory)
    for name in (TOPOLOGY_FILE, WEIGHTS_FILE):
        if not (directory / name).is_file():
            raise EsperError(f"'{directory}' holds no saved network: {name} is missing")
    topology: dict[str, Any] = json.loads((directory / TOPOLOGY_FILE).read_text())
    with TorchStream(0):  # initial values are overwritten, so they must not cost a draw
        chain = _rebuild(topology)
    chain.load_state_dict(load_file(directory / WEIGHTS_FILE))
    if topology["host"] != "gpt":
        chain.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's stubs
    return chain


def _rebuild(topology: dict[str, Any]) -> nn.Sequential:
    if topology["host"] not in _HOSTS:
        raise UnknownNameError("kind of host", topology["host"], _HOSTS)
    host = _HOSTS[topology["host"]](**topology["spec"])
    fossils = {}
    for entry in topology["fossils"]:
        width = host.widths[entry["index"]]
        operator = STYLE_OPERATORS[BLEND_IDS.index(entry["style"])]
        gate = blend.Gate(width, host.topology) if operator is BlendOperator.GATE else None
        spec = blueprint_named(entry["blueprint"], host.topology)
        seed = spec.build(copy.deepcopy(host.original(entry["index"])) if spec.copies else width)
        fossils[entry["index"]] = Fossil(seed, gate, operator)
    return _chain(host, fossils)
