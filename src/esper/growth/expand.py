"""Expansion of a pretrained model by blocks, hidden units or low-rank weights that do not change its outputs
at birth."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, Final, Literal

from torch import nn

from esper.growth.diagnose import diagnose
from esper.growth.expand_report import size_of
from esper.growth.expanded import EXPANDED, Expanded, Request
from esper.growth.growth import Growth
from esper.growth.torch_wrappers import unwrapped
from esper.kasmina.blueprints.tokens import low_rank
from esper.kasmina.blueprints.widen import NewUnits
from esper.kasmina.dry_run import dry_forward
from esper.kasmina.insertion_search import are_equal
from esper.kasmina.seed_description import description_of
from esper.kasmina.transaction import Transaction
from esper.leyline.errors import EsperError
from esper.leyline.factored_actions import Style

BLUEPRINTS: Final = {"blocks": "stack", "widen": "widen", "rank": "lora"}
LEAST_BYTES: Final = 2
"""Smallest size of a number in a weight of which a copy can be trained."""

LANES: Final = 32
"""Largest number of values that torch computes at once on a CPU. Activation functions may give other last
digits for the values that are left at the end of a tensor."""


def expand(
    model: nn.Module,
    *,
    sample: Any,
    blocks: int | None = None,
    widen: int | None = None,
    rank: int | None = None,
    where: str | Sequence[str] | None = None,
    train: Literal["new", "all"] = "new",
    **race: Any,
) -> Expanded:
    """Add blocks, hidden units or low-rank weights to a pretrained model, without a change of its outputs.

    The model is changed in place. A new block is a copy of a block, inserted behind it, with zeroed output
    projections; new hidden units have zero outgoing weights. The outputs for ``sample`` must be bit-equal
    before and after. Make the optimiser after this call, from ``expanded.parameters()``.

    Args:
        model: Model to expand, before it is wrapped by ``DistributedDataParallel``, ``fully_shard`` or
            ``torch.compile``.
        sample: Input that the model is called with: a tensor, a tuple of arguments, or a dict of keyword
            arguments.
        blocks: Number of blocks to add; pass one of ``blocks``, ``widen`` and ``rank``.
        widen: Number of hidden units to add at every place.
        rank: Rank of the low-rank weights to add to every linear layer; an even number.
        where: ``"top"``, the highest blocks of the largest list of blocks (default for ``blocks``); ``"all"``
            blocks (default for ``widen`` and ``rank``); names or globs of blocks, or of linear layers for
            ``rank``; or ``"diagnose"``, the best places in a short race on the loaders.
        train: ``"new"`` freezes everything but the new parameters; ``"all"`` freezes nothing, and keeps a
            copy of the old weights in the memory of the CPU.
        race: Arguments of ``esper.diagnose`` for ``where="diagnose"``: ``train_loader``, ``val_loader``,
            ``loss``, and optionally ``steps``, ``minutes``, ``optimizer`` and ``show``.

    Returns:
        Expansion with the names of the parameters that train, and methods to compare, report and finish.

    Raises:
        EsperError: An argument is not valid, the model cannot be expanded there, or its outputs would change.
            After any error, and after Ctrl-C, the model is unchanged.

    Example:
        >>> expanded = esper.expand(model, blocks=2, sample=batch)
        >>> optimizer = torch.optim.AdamW(expanded.parameters(), lr=1e-4)
    """
    kind, size = _kind_and_size({"blocks": blocks, "widen": widen, "rank": rank})
    _check_model(model)
    if train not in ("new", "all"):
        raise EsperError(f"train is {train!r}; pass 'new' to freeze the old parameters, or 'all'")
    named = where if where is not None else "top" if kind == "blocks" else "all"
    wanted, diagnosis = size if kind == "blocks" else 1, None
    needed = {"train_loader", "val_loader", "loss"} if named == "diagnose" else set()
    if needed - race.keys() or (race and not needed):
        raise EsperError(
            f"where is {named!r} with {', '.join(race) or 'no further arguments'}; for where='diagnose',"
            " a race on your data, pass train_loader, val_loader and loss"
        )
    if needed:
        race |= {"slots": places_of(model, kind, "all", 1, sample), "blueprints": [BLUEPRINTS[kind]]}
        diagnosis = diagnose(model, **race, sample=sample)
        named = [row.place for row in diagnosis.rows if row.steps][:wanted]
        if len(named) < wanted:
            raise EsperError(f"the race compared {len(named)} places, {wanted} are needed; allow more steps=")
    slots = places_of(model, kind, named, wanted, sample)
    request = Request(kind, size, train, sample)
    with Transaction([model]) as change:
        flags = {p: p.requires_grad for p in model.parameters()}
        change.afterwards(lambda: [p.requires_grad_(flag) for p, flag in flags.items()])
        change.afterwards(lambda: EXPANDED.discard(model))
        buffers = {id(buffer) for buffer in model.buffers()}
        only = [BLUEPRINTS[kind]]
        growth = Growth(model, sample=sample, mode="min", slots=slots, controller=None, blueprints=only)
        _check_places(growth, kind, size)
        _plant(growth, request)
        expanded = Expanded(growth, request, flags, buffers)
        expanded.diagnosis = diagnosis
        return expanded


# --- checks -------------------------------------------------------------------------------------------------


def _kind_and_size(given: dict[str, Any]) -> tuple[str, int]:
    """Return the one kind of expansion that is given, and its size."""
    chosen = {name: value for name, value in given.items() if value is not None}
    if len(chosen) != 1:
        found = " and ".join(f"{name}={value!r}" for name, value in chosen.items()) or "none of them"
        raise EsperError(f"pass one of blocks=, widen= and rank=; found {found}")
    [(kind, size)] = chosen.items()
    step = 2 if kind == "rank" else 1
    is_number = isinstance(size, Integral) and not isinstance(size, bool)
    if not is_number or size < step or size % step:
        what = "an even number, 2 or more" if kind == "rank" else "a whole number, 1 or more"
        raise EsperError(f"{kind} is {size!r}; it must be {what}")
    return kind, int(size)


def _check_model(model: Any) -> None:
    """Raise EsperError unless the model is a plain module that is not expanded yet."""
    modules, name = model.modules() if isinstance(model, nn.Module) else (), type(model).__name__
    if any(hasattr(p, "full_tensor") for module in modules for p in module.parameters(recurse=False)):
        raise EsperError(f"this {name} is sharded, so nothing can be added; expand it before fully_shard")
    net = unwrapped(model)
    if any(module in EXPANDED for module in net.modules()):
        raise EsperError(f"this {name} is expanded already; call finish() of its expansion before another")
    if net is not model:
        kind = type(net).__name__
        raise EsperError(
            f"a {name} would not train new parameters; pass the {kind} in it, wrap it afterwards"
        )


# --- places -------------------------------------------------------------------------------------------------


def places_of(
    model: nn.Module, kind: str, where: str | Sequence[str], wanted: int, sample: Any
) -> str | Sequence[str]:
    """Return names or globs of the submodules that an expansion changes."""
    if where not in ("top", "all"):
        return where
    sizes = {path: size_of(module) for path, module in model.named_modules() if _holds_blocks(module)}
    if not sizes:
        raise EsperError(f"{type(model).__name__} has no list of blocks; name submodules with where=[…]")
    path = max(sizes, key=lambda path: sizes[path])
    names = [f"{path}.{name}".lstrip(".") for name, _ in model.get_submodule(path).named_children()]
    if where == "top" and wanted > len(names):
        raise EsperError(
            f"blocks is {wanted}, and each of the {len(names)} blocks of '{path}' is copied once at most;"
            f" pass {len(names)} or less, and expand again after finish()"
        )
    names = names[-wanted:] if where == "top" else names
    if kind != "rank":
        return names
    calls = [each.path for each in dry_forward(model, sample)[0]]
    once = [
        each for each in calls if calls.count(each) == 1 and each.startswith(tuple(f"{n}." for n in names))
    ]
    layers = [each for each in once if type(model.get_submodule(each)) is nn.Linear]
    if not layers:
        raise EsperError(f"no torch.nn.Linear runs once per forward pass in {', '.join(names)}; name others")
    return layers


def _holds_blocks(module: nn.Module) -> bool:
    """Return whether a module is a list of modules of one class, which have layers of their own."""
    blocks = list(module.children()) if isinstance(module, nn.ModuleList | nn.Sequential) else []
    return len({type(block) for block in blocks}) == 1 and all(list(block.children()) for block in blocks)


def _check_places(growth: Growth, kind: str, size: int) -> None:
    """Raise EsperError if the slots do not fit the kind and the size of the expansion."""
    if kind == "blocks" and len(growth.slots) != size:
        names = ", ".join(growth.slots)
        raise EsperError(
            f"blocks is {size}, and where names {len(growth.slots)} submodules ({names}); name as many as you"
            " add, because each is copied once"
        )
    for name, slot in zip(growth.slots, growth.network.slots, strict=True):
        module, place = slot.place.module, f"'{name}', a {type(slot.place.module).__name__}"
        if kind == "rank" and type(module) is not nn.Linear:
            raise EsperError(f"where names {place}; rank adds weights to torch.nn.Linear layers, name those")
        small = (not p.is_floating_point() or p.element_size() < LEAST_BYTES for p in module.parameters())
        if kind == "blocks" and (any(small) or any(hasattr(m, "_packed_params") for m in module.modules())):
            raise EsperError(f"{place}, has quantised weights, of which a copy cannot be trained; pass rank=")


# --- new parameters -----------------------------------------------------------------------------------------


def _plant(growth: Growth, request: Request) -> None:
    """Plant a seed of the requested size in every slot, and compare the outputs before and after."""
    before, is_block = dry_forward(growth.net, request.sample)[1], request.kind == "blocks"
    for name, slot in zip(growth.slots, growth.network.slots, strict=True):
        growth.germinate(name, BLUEPRINTS[request.kind], zero=is_block, moments=False)
        graft, like = slot.held, next(slot.held.parameters())
        layers: Any = slot.place.layers
        if request.kind == "rank":
            graft.seed = low_rank(slot.site.width, request.size)
            graft.description = description_of(BLUEPRINTS["rank"], Style.LINEAR_ADD, request.size)
        elif layers is not None and not is_block:
            graft.seed = NewUnits(layers, request.size)
        graft.to(like).train(slot.place.module.training)
        growth.network.sync()
        if is_block or name == growth.slots[-1]:
            after = dry_forward(growth.net, request.sample)[1]
            if not are_equal(before, after):  # Recorded hidden states may have one more entry per block.
                remedy = f"pass a multiple of {LANES}" if request.kind == "widen" else "name other places"
                raise EsperError(
                    f"the outputs of {type(growth.net).__name__} for the sample change with the new"
                    f" parameters at {name}, so the old model would not be kept bit for bit; {remedy}"
                )
            before = after
