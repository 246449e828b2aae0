"""Checks whether a saved state or layout fits the network that is to load it."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from esper.kasmina.graft import Graft
from esper.kasmina.slot import RESERVED, SeedSlot, slots_of
from esper.leyline.errors import HostError


def without_seeds(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a state dict that belong to the host and not to seeds."""
    return {name: value for name, value in tensors.items() if RESERVED not in name.split(".")}


def check_state(slots: Sequence[SeedSlot], host: nn.Module, state: dict[str, Any]) -> None:
    """Raise HostError unless a saved ``state`` fits the slots ``slots`` and the host with its inserted blocks,
    and all its weights are finite."""
    other = "the state belongs to another host;"
    tensors: dict[str, Tensor] = state["host"]
    own, plain = without_seeds(host.state_dict()), without_seeds(tensors)
    names = sorted(own.keys() ^ plain.keys())
    names += [name for name in own.keys() & plain.keys() if own[name].shape != plain[name].shape]
    if names:
        raise HostError(f"{other} different: {', '.join(names[:5])}")
    if len(state["slots"]) != len(slots):
        raise HostError(f"{other} it has {len(state['slots'])} slots and this network has {len(slots)}")
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
    """Return a graft with the weights of a state dict for every slot, not attached; None if the state dict has
    no side module in the slot.
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
    if not own.keys() <= set(other):
        raise HostError("this is no state of a Growth; pass what its state_dict() returned")
    if (other["network"], other["sites"]) != (own["network"], own["sites"]):
        raise HostError(
            f"the checkpoint is of a {other['network']} with slots {_listed(other['sites'])}; this is a"
            f" {own['network']} with slots {_listed(own['sites'])}. Build the same network and pass"
            " the same slots= before load_state_dict"
        )


def _listed(sites: Sequence[Sequence[Any]]) -> str:
    return ", ".join(f"{name} ({topology}, {width} wide)" for name, _, topology, width in sites)
