"""State and layout of a growing network, and checks whether they fit the network that is to load them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import blueprint_named
from esper.kasmina.edit_notes import weights_of
from esper.kasmina.graft import BlockGraft, Graft
from esper.kasmina.seed_description import described_causality, described_rank, description_of
from esper.kasmina.slot import RESERVED, SeedSlot, slots_of
from esper.kasmina.transaction import Transaction
from esper.leyline import SlotTable
from esper.leyline.errors import HostError

if TYPE_CHECKING:
    from esper.kasmina.network import MorphogeneticModel


def state_of(model: MorphogeneticModel) -> dict[str, Any]:
    """Return weights, buffers, seeds, random streams of the slots, and the slot table of a network."""
    return {
        "host": weights_of(model.host),
        "slots": [
            {
                "stochastic": slot.graft is not None and slot.graft.stochastic,
                "stream": slot.stream and slot.stream.get_state(),
            }
            for slot in model.slots
        ],
        "table": {name: torch.from_numpy(a.copy()) for name, a in model.table.arrays().items()},
    }


def load_state(model: MorphogeneticModel, state: dict[str, Any]) -> None:
    """Load weights, seeds, random streams and slot table of ``state``; raise HostError and change nothing if
    they do not fit the network."""
    table = SlotTable(**{name: value.numpy() for name, value in state["table"].items()})
    check_slots(model.slots, state)
    with Transaction([model.host], objects=model.slots):
        _match_blocks(model, table)
        check_state(model.slots, model.host, state)
        grafts = loaded_grafts(model.slots, model.host, state["host"])
    for slot in model.slots:
        if slot.graft is not None and not isinstance(slot.graft, BlockGraft):
            slot.remove()
    model.host.load_state_dict(without_seeds(state["host"]))
    for slot, graft, kept in zip(model.slots, grafts, state["slots"], strict=True):
        if graft is not None:
            slot.hold(graft)
        if slot.graft is not None:
            slot.graft.stream, slot.graft.stochastic = slot.stream, kept["stochastic"]
        if slot.stream is not None:
            slot.stream.set_state(kept["stream"])
    model.table.assign(table)


def _match_blocks(model: MorphogeneticModel, table: SlotTable) -> None:
    """Insert and remove blocks, so that the network has those of the slot table, with arbitrary weights."""
    names = model.action_space.blueprint_names
    for index, slot in enumerate(model.slots):
        name, style = names[table.blueprint[0, index]], int(table.style[0, index])
        is_block = slot.place.container is not None and bool(table.occupied[0, index])
        if is_block and blueprint_named(name, slot.site.topology).copies:
            slot.match(description_of(name, style), None)
        elif isinstance(slot.graft, BlockGraft):
            slot.match(None, None)


def layout_of(model: MorphogeneticModel) -> dict[str, Any]:
    """Return class, sites, blueprint names and slot table of a network as plain values, without weights."""
    return {
        "network": f"{type(model.host).__module__}.{type(model.host).__qualname__}",
        "sites": [[site.name, site.path, site.topology, site.width] for site in model.sites],
        "blueprints": list(model.action_space.blueprint_names),
        "table": {name: array[0].tolist() for name, array in model.table.arrays().items()},
        "ranks": [slot.graft and described_rank(slot.graft.description) for slot in model.slots],
        "causal": [slot.graft is None or described_causality(slot.graft.description) for slot in model.slots],
    }


def plant_layout(model: MorphogeneticModel, state: dict[str, Any]) -> SlotTable:
    """Plant the seeds of a saved layout with arbitrary weights, in the order in which they were planted, and
    return the slot table of the layout."""
    check_layout(layout_of(model), state)
    table = SlotTable.empty(1, len(model.slots))
    ranks = state.get("ranks", [None] * len(model.slots))  # Earlier versions did not save these two.
    causal = state.get("causal", [True] * len(model.slots))
    for name, array in table.arrays().items():
        array[0] = state["table"][name]
    for index in sorted(range(len(model.slots)), key=lambda i: table.seed_id[0, i]):
        wanted = None
        if table.occupied[0, index]:
            blueprint = state["blueprints"][table.blueprint[0, index]]
            style = int(table.style[0, index])
            wanted = description_of(blueprint, style, ranks[index], is_causal=causal[index])
        model.slots[index].match(wanted, model.like(index))
    return table


def without_seeds(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a state dict that belong to the host and not to seeds."""
    return {name: value for name, value in tensors.items() if RESERVED not in name.split(".")}


def check_slots(slots: Sequence[SeedSlot], state: dict[str, Any]) -> None:
    """Raise HostError unless a saved ``state`` has as many slots as the network."""
    if len(state["slots"]) != len(slots):
        raise HostError(
            f"the state belongs to another host; it has {len(state['slots'])} slots and this network has"
            f" {len(slots)}"
        )


def check_state(slots: Sequence[SeedSlot], host: nn.Module, state: dict[str, Any]) -> None:
    """Raise HostError unless a saved ``state`` fits the slots ``slots`` and the host with its inserted
    blocks, and all its weights are finite."""
    other = "the state belongs to another host;"
    tensors: dict[str, Tensor] = state["host"]
    own, plain = without_seeds(weights_of(host)), without_seeds(tensors)
    names = sorted(own.keys() ^ plain.keys())
    names += [name for name in own.keys() & plain.keys() if own[name].shape != plain[name].shape]
    if names:
        raise HostError(f"{other} different: {', '.join(names[:5])}")
    seeds = {name.partition(f".{RESERVED}.")[0] for name in tensors if name not in plain}
    if unknown := sorted(seeds - slots_of(host).keys()):
        raise HostError(f"{other} it has a seed at {unknown[0]}, where this network has no slot")
    for slot, kept in zip(slots, state["slots"], strict=True):
        if slot.stream is not None and kept["stream"] is None:
            raise HostError(f"{other} its slot {slot.site.name} has no random stream")
    if not all(bool(t.isfinite().all()) for t in tensors.values()):
        raise HostError("a state with weights that are not finite cannot be returned to")


def loaded_grafts(
    slots: Sequence[SeedSlot], host: nn.Module, tensors: dict[str, Tensor]
) -> list[Graft | None]:
    """Return a graft with the weights of a state dict for every slot, not attached; None if the state dict
    has no side module in the slot.
    """
    paths = {slot: path for path, slot in slots_of(host).items()}
    return [_loaded_graft(slot, f"{paths[slot]}.{RESERVED}.graft.", tensors) for slot in slots]


def _loaded_graft(slot: SeedSlot, prefix: str, tensors: dict[str, Tensor]) -> Graft | None:
    own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    if not own:
        return None
    try:
        graft = slot.rebuilt(own["description"], own["alpha"])
        graft.load_state_dict(own)
    except (KeyError, RuntimeError) as error:
        found = str(error).splitlines()[-1].strip()
        raise HostError(
            f"the state's seed in slot {slot.site.name} does not fit its blueprint: {found}"
        ) from None
    return graft


def check_layout(own: dict[str, Any], other: dict[str, Any]) -> None:
    """Raise HostError unless the saved layout ``other`` has the same network class and sites as the present
    layout ``own``."""
    if not own.keys() - {"ranks", "causal"} <= set(other):
        raise HostError("this is no state of a Growth; pass what its state_dict() returned")
    if (other["network"], other["sites"]) != (own["network"], own["sites"]):
        raise HostError(
            f"the checkpoint is of a {other['network']} with slots {_listed(other['sites'])}; this is a"
            f" {own['network']} with slots {_listed(own['sites'])}. Build the same network and pass"
            " the same slots= before load_state_dict"
        )


def _listed(sites: Sequence[Sequence[Any]]) -> str:
    return ", ".join(f"{name} ({topology}, {width} wide)" for name, _, topology, width in sites)
