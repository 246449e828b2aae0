"""Expansion of a pretrained model by blocks, hidden units or low-rank weights that do not change its outputs
at birth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any, Final, Literal

import torch
from torch import nn

from esper.growth.batch_training import Loss
from esper.growth.diagnose import DIAGNOSIS_STEPS, diagnose
from esper.growth.expanded import EXPANDED, Expanded, InsertedBlock, Request
from esper.growth.growth import Growth
from esper.growth.torch_wrappers import unwrapped
from esper.kasmina.blueprints.tokens import low_rank
from esper.kasmina.blueprints.widen import NewUnits
from esper.kasmina.dry_run import call, dry_forward, untouched
from esper.kasmina.graft import description_of
from esper.kasmina.insertion_search import are_equal
from esper.kasmina.transaction import Transaction
from esper.leyline.errors import EsperError
from esper.leyline.factored_actions import Style

BLUEPRINTS: Final = {"blocks": "stack", "widen": "widen", "rank": "lora"}
LEAST_BYTES: Final = 2
"""Smallest size of a number in a weight of which a copy can be trained."""

LANES: Final = 32
"""Numbers that torch computes at once on the CPU, in the widest case; it may round the last ones of a tensor, if
they are fewer, in another way."""


def expand(  # noqa: PLR0913  all arguments but one are keyword-only
    model: nn.Module,
    *,
    sample: Any,
    blocks: int | None = None,
    widen: int | None = None,
    rank: int | None = None,
    where: str | Sequence[str] | None = None,
    train: Literal["new", "all"] = "new",
    train_loader: Iterable[Any] | None = None,
    val_loader: Iterable[Any] | None = None,
    loss: Loss | None = None,
    steps: int = DIAGNOSIS_STEPS,
    show: Callable[[str], object] = print,
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
        train_loader: Training batches for ``"diagnose"``.
        val_loader: Validation batches for ``"diagnose"``.
        loss: Loss function for ``"diagnose"``, as in ``esper.diagnose``.
        steps: Largest compute of ``"diagnose"``, as a number of training steps of the model.
        show: Function that receives the cost of ``"diagnose"`` before the race starts.

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
    wanted, found = size if kind == "blocks" else 1, None
    if named == "diagnose":
        if train_loader is None or val_loader is None or loss is None:
            raise EsperError(
                "where is 'diagnose', which is a race on your data; pass train_loader, val_loader and loss"
            )
        tried = places_of(model, kind, "all", wanted, sample)
        settings: dict[str, Any] = {"loss": loss, "steps": steps, "sample": sample, "show": show}
        found = diagnose(
            model, train_loader, val_loader, slots=tried, blueprints=[BLUEPRINTS[kind]], **settings
        )
        named = [row.place for row in found.rows[:wanted]]
    slots = places_of(model, kind, named, wanted, sample)
    request = Request(kind, size, train, sample)
    with Transaction([model]) as change:
        flags = {p: p.requires_grad for p in model.parameters()}
        change.afterwards(lambda: [p.requires_grad_(flag) for p, flag in flags.items()])
        change.afterwards(lambda: EXPANDED.discard(model))
        old = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        growth = Growth(model, sample=sample, mode="min", slots=slots, controller=None)
        _check_places(growth, kind, size)
        _plant(growth, request)
        inserted = []
        if kind == "blocks":
            places = [slot.place for slot in growth.network.slots]
            copies = [slot.held.seed for slot in growth.network.slots]
            inserted = [
                InsertedBlock(place.container, place.module, block)
                for place, block in zip(places, copies, strict=True)
                if place.container is not None
            ]
            growth.finish(merge=False)
        expanded = Expanded(growth, request, inserted, old, flags)
        expanded.diagnosis = found
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
    if not isinstance(size, Integral) or isinstance(size, bool) or size < step or size % step:
        what = "an even number, 2 or more" if kind == "rank" else "a whole number, 1 or more"
        raise EsperError(f"{kind} is {size!r}; it must be {what}")
    return kind, int(size)


def _check_model(model: Any) -> None:
    """Raise EsperError unless the model is a plain module that is not expanded yet."""
    if isinstance(model, nn.Module):
        if any("FSDPModule" in _class_names(part) for part in model.modules()) or any(
            hasattr(p, "full_tensor") for p in model.parameters()
        ):
            raise EsperError(
                f"this {type(model).__name__} is sharded already, and new parameters cannot join its shards;"
                " call expand before fully_shard"
            )
        if any(part in EXPANDED for part in model.modules()):
            raise EsperError(
                f"this {type(model).__name__} is expanded already; call finish() of its expansion before"
                " another"
            )
    net = unwrapped(model)
    if net is not model:
        raise EsperError(
            f"the model is inside a {type(model).__name__}, which would not train new parameters; pass the"
            f" {type(net).__name__} in it, and wrap it afterwards"
        )


def _class_names(module: nn.Module) -> set[str]:
    return {kind.__name__ for kind in type(module).__mro__}


# --- places -------------------------------------------------------------------------------------------------


def places_of(
    model: nn.Module, kind: str, where: str | Sequence[str], wanted: int, sample: Any
) -> str | Sequence[str]:
    """Return names or globs of the submodules that the expansion changes."""
    if where == "auto":
        raise EsperError("where is 'auto'; pass 'top', 'all', 'diagnose', or names or globs of submodules")
    if where not in ("top", "all"):
        return where
    path = _largest_container(model)
    if path is None:
        raise EsperError(
            f"{type(model).__name__} has no list of blocks for where={where!r}; name submodules, as in"
            f" where=['{next((name for name, _ in model.named_children()), 'layer')}']"
        )
    names = [f"{path}.{name}".lstrip(".") for name, _ in model.get_submodule(path).named_children()]
    if where == "top":
        if wanted > len(names):
            raise EsperError(
                f"blocks is {wanted}, and '{path}' has {len(names)} blocks, of which each is copied once; pass"
                f" at most {len(names)}, and expand again after finish()"
            )
        names = names[-wanted:]
    return names if kind != "rank" else _linear_layers(model, names, sample)


def _largest_container(model: nn.Module) -> str | None:
    """Return the path of the list of blocks of one class that has the most parameters."""

    def is_list_of_blocks(module: nn.Module) -> bool:
        blocks = list(module.children())
        return (
            isinstance(module, nn.ModuleList | nn.Sequential)
            and len({type(block) for block in blocks}) == 1
            and all(any(True for _ in block.children()) for block in blocks)
        )

    sizes = {
        path: sum(p.numel() for p in module.parameters())
        for path, module in model.named_modules()
        if is_list_of_blocks(module)
    }
    return max(sizes, key=lambda path: sizes[path], default=None)


def _linear_layers(model: nn.Module, blocks: Iterable[str], sample: Any) -> list[str]:
    """Return the paths of the linear layers in blocks that run once per forward pass and return features."""
    calls, _ = dry_forward(model, sample)
    runs = [each.path for each in calls]
    inside = tuple(f"{block}." for block in blocks)
    found = [
        each.path
        for each in calls
        if each.path.startswith(inside)
        and runs.count(each.path) == 1
        and type(model.get_submodule(each.path)) is nn.Linear
        and each.output.ndim in (2, 3)
    ]
    if not found:
        raise EsperError(
            f"no torch.nn.Linear runs once per forward pass in {', '.join(blocks)}; rank adds low-rank weights"
            " to linear layers only, so pass blocks= or widen="
        )
    return found


def _check_places(growth: Growth, kind: str, size: int) -> None:
    """Raise EsperError if the slots do not fit the kind and the size of the expansion."""
    names = ", ".join(growth.slots)
    if kind == "blocks" and len(growth.slots) != size:
        raise EsperError(
            f"blocks is {size}, and where names {len(growth.slots)} submodules ({names}); each named block is"
            " copied once, so name as many as you add"
        )
    for name in growth.slots:
        module = growth.network.slots[growth.slots.index(name)].place.module
        if kind == "rank" and type(module) is not nn.Linear:
            raise EsperError(
                f"where names '{name}', a {type(module).__name__}, and rank adds low-rank weights to linear"
                " layers only; name torch.nn.Linear layers"
            )
        if kind == "blocks" and _is_quantised(module):
            raise EsperError(
                f"the block '{name}' has quantised weights, of which a copy cannot be trained; load the model"
                " without quantisation, or pass rank="
            )


def _is_quantised(module: nn.Module) -> bool:
    small = (not p.is_floating_point() or p.element_size() < LEAST_BYTES for p in module.parameters())
    return any(small) or any(hasattr(part, "_packed_params") for part in module.modules())


# --- new parameters -----------------------------------------------------------------------------------------


def _plant(growth: Growth, request: Request) -> None:
    """Plant a seed in every slot, and compare the outputs of the model before and after."""
    before, last = _output(growth.net, request.sample), growth.slots[-1]
    for index, name in enumerate(growth.slots):
        growth.germinate(name, BLUEPRINTS[request.kind], zero=request.kind == "blocks", moments=False)
        if request.kind != "blocks":
            _resize(growth, index, request)
        if request.kind == "blocks" or name == last:  # Recorded hidden states have one more entry per block.
            after = _output(growth.net, request.sample)
            if not are_equal(before, after):
                remedy = "expand it at other places"
                if request.kind == "widen":
                    remedy = f"pass a multiple of {LANES}, with which activation functions round as before"
                raise EsperError(
                    f"the outputs of {type(growth.net).__name__} for the sample change with the new parameters"
                    f" at {name}, so the old model would not be kept bit for bit; {remedy}"
                )
            before = after


@torch.no_grad()
def _output(model: nn.Module, sample: Any) -> Any:
    with untouched(model, training=False):
        return call(model, sample)


def _resize(growth: Growth, index: int, request: Request) -> None:
    """Replace the seed in a slot by one of the requested number of hidden units, or rank."""
    slot = growth.network.slots[index]
    graft, like = slot.held, next(slot.held.parameters())
    if request.kind == "widen":
        assert slot.place.layers is not None
        graft.seed = NewUnits(slot.place.layers, request.size)
    else:
        graft.seed = low_rank(slot.site.width, request.size)
        graft.description = description_of(BLUEPRINTS["rank"], Style.LINEAR_ADD, request.size)
    graft.to(like).train(slot.place.module.training)
    growth.network.sync()
