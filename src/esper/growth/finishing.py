"""From a network with slots to a plain one: seeds become graphs of torch modules, and the result is compared.

A seed's graph is a child of its submodule and that submodule's forward hook, so class, signature,
attributes, containers and other hooks stay, and torch's fused paths, which look for hooks, step aside.
Nothing of esper is needed to unpickle it. A linear seed behind a linear layer becomes part of its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, fx, nn

from esper.growth.sites import GROWN, Output, call, tensors_in, untouched
from esper.growth.slot import RESERVED, Graft, GrowthSlot, forget_compiled, replaced, slots_of
from esper.kasmina import blend
from esper.kasmina.blueprints import Mirrored
from esper.kasmina.blueprints.tokens import Heads, causal_attention
from esper.leyline.errors import BlueprintError, HostError
from esper.leyline.factored_actions import BlendOperator

MERGED_TOLERANCE: Final = (1e-4, 1e-5)
"""Relative and absolute. A merged weight sums in another order; all else is compared bit for bit."""

Undo = Callable[[], None]
Outputs = dict[str, list[Tensor]]
Leave = Callable[[Iterable[nn.Parameter]], None]


def finish(net: nn.Module, sample: Any, *, merge: bool, leave: Leave) -> bool:
    """Turn all slots of ``net`` into plain modules; returns whether graphs were left in it.

    ``leave`` is told of parameters that were merged away. On a difference everything is as it was, and the
    slot is named.
    """
    wanted = _outputs(net, sample)
    undone: list[Undo] = []
    merged: list[nn.Parameter] = []
    graphs = False
    try:
        for path, slot in slots_of(net).items():
            graft, submodule = slot.graft, net.get_submodule(path)
            if graft is None:
                undone.append(_without(submodule, slot))
            elif merge and _is_linear(net, submodule, slot) and (undo := _merge(net, slot, sample, wanted)):
                merged += graft.parameters()
                undone.append(undo)
            else:
                graphs = True
                undone.append(_settle(submodule, slot))
            _compare(wanted, _outputs(net, sample), slot.site.name, exact=not merged)
    except BaseException:  # Ctrl-C too leaves nothing half done
        for undo in reversed(undone):
            undo()
        raise
    leave(merged)
    forget_compiled()
    return graphs


@contextmanager
def plain_on_error(finish: Callable[[], nn.Module]) -> Iterator[None]:
    """After an error nobody is left to finish the network: it is plain then, as far as it was trained."""
    try:
        yield
    except BaseException as error:
        try:
            finish()
        except Exception as other:
            error.add_note(f"esper could not make the network plain again: {other}")
        raise


# --- one slot -----------------------------------------------------------------------------------------------


def _without(submodule: nn.Module, slot: GrowthSlot) -> Undo:
    """Take an empty slot out."""
    del submodule._modules[RESERVED]
    return lambda: submodule.add_module(RESERVED, slot)


def _settle(submodule: nn.Module, slot: GrowthSlot) -> Undo:
    """Put the seed's graph in the place of the slot, the hook in the place of its hook."""
    assert slot.graft is not None
    assert slot.handle is not None
    graph = graph_of(slot.graft, slot.site.output).train(submodule.training)
    number, name = slot.handle.id, GROWN
    while hasattr(submodule, name):
        name += "_more"
    del submodule._modules[RESERVED]
    submodule.add_module(name, graph)
    submodule._forward_hooks[number] = graph

    def undo() -> None:
        del submodule._modules[name]
        submodule.add_module(RESERVED, slot)
        submodule._forward_hooks[number] = slot.on_forward

    return undo


def _is_linear(net: nn.Module, submodule: nn.Module, slot: GrowthSlot) -> bool:
    """Whether the seed is a linear map behind a linear layer of its own."""
    graft = slot.graft
    assert graft is not None
    if type(submodule) is not nn.Linear or graft.operator is not BlendOperator.ADD:
        return False
    layers = [m for m in graft.seed.modules() if not isinstance(m, Mirrored | nn.Sequential)]
    names = [n for n, p in net.named_parameters(remove_duplicate=False) if p is submodule.weight]
    return (
        type(graft.seed) is Mirrored
        and all(type(layer) is nn.Linear and layer.bias is None for layer in layers)
        and len(names) == 1
    )


@torch.no_grad()
def _merge(net: nn.Module, slot: GrowthSlot, sample: Any, wanted: Outputs) -> Undo | None:
    """W ← (1 + alpha·M)·W and b likewise, M being the seed's map; None where rounding does not allow it.

    A weight in bfloat16 keeps too few digits for the sum, and a long network may amplify what is lost.
    """
    layer = net.get_submodule(slot.site.path)
    assert isinstance(layer, nn.Linear)
    assert slot.graft is not None
    kept = [(p, p.clone()) for p in layer.parameters(recurse=False)]
    for parameter, before in kept:
        rows = before.double().view(layer.out_features, -1).T
        change = slot.graft.seed.double()(rows).T.reshape(before.shape)
        parameter.copy_(before.double() + slot.graft.alpha.double() * change)
    slot.graft.seed.to(layer.weight.dtype)
    graft = slot.remove()
    del layer._modules[RESERVED]

    def undo() -> None:
        for parameter, before in kept:
            parameter.data.copy_(before)
        layer.add_module(RESERVED, slot)
        slot.hold(layer, graft)

    try:
        _compare(wanted, _outputs(net, sample), slot.site.name, exact=False)
    except HostError:
        undo()
        return None
    return undo


# --- a seed as a graph ------------------------------------------------------------------------------------


class _Hook(nn.Module):
    """What the slot's hook does, in operations that can be traced."""

    alpha: Tensor

    def __init__(self, graft: Graft, where: Output) -> None:
        super().__init__()
        self.seed, self.gate, self.operator = graft.seed, graft.gate, graft.operator
        self.swap, self.where = graft.swap, where
        self.full = bool(graft.alpha == 1.0)
        self.register_buffer("alpha", graft.alpha)

    def forward(self, _module: Any, _args: Any, output: Any) -> Any:
        h = self.where.features(output)
        seen = h.transpose(*self.swap) if self.swap else h
        change = blend.pure_change(self.operator, seen, self.seed, self.gate).to(seen.dtype)
        grown = seen + change if self.full else torch.addcmul(seen, self.alpha.to(seen.dtype), change)
        return replaced(self.where, output, grown.transpose(*self.swap) if self.swap else grown)


class _Tracer(fx.Tracer):
    """Goes into everything that is esper's or stands on it, and keeps the rest as it is."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not any(_is_ours(type(inner)) for inner in m.modules())


def _is_ours(kind: type) -> bool:
    return any(base.__module__.split(".")[0] == "esper" for base in kind.__mro__)


def graph_of(graft: Graft, where: Output) -> fx.GraphModule:
    """The seed as a hook ``(module, args, output)`` of torch modules only, sharing its parameters."""
    hook = _Hook(graft, where)
    try:
        with _plain_attention(graft):
            graph = _Tracer().trace(hook)
    except Exception as error:
        raise BlueprintError(
            f"the forward of {type(graft.seed).__name__} cannot be traced into torch modules: {error}. Write"
            " it without branches on values, or do not derive it from classes of esper"
        ) from error
    for node in graph.nodes:
        node.type = None  # annotations as text cannot be pickled
    graph._tracer_cls = None  # it would be pickled by name, and is esper's
    return fx.GraphModule(hook, graph, class_name="Grown")


@contextmanager
def _plain_attention(graft: Graft) -> Iterator[None]:
    """Flex attention chooses its kernel by the tensor it sees, which cannot be traced; the plain one can."""
    heads = [(m, m.attend) for m in graft.modules() if isinstance(m, Heads)]
    for module, _ in heads:
        module.attend = causal_attention
    try:
        yield
    finally:
        for module, attend in heads:
            module.attend = attend


# --- comparing --------------------------------------------------------------------------------------------


def _outputs(net: nn.Module, sample: Any) -> Outputs:
    """All tensors that ``net`` returns for the sample: in both modes, with and without grad."""
    found = {}
    for training in (False, True):
        for grad in (False, True):
            with untouched(net, training=training), torch.set_grad_enabled(grad):
                result = [t.detach().clone() for t in tensors_in(call(net, sample))]
            found[f"in {'train' if training else 'eval'} mode with{'' if grad else 'out'} grad"] = result
    return found


def _compare(wanted: Outputs, found: Outputs, slot: str, *, exact: bool) -> None:
    rtol, atol = (0.0, 0.0) if exact else MERGED_TOLERANCE
    for how, before in wanted.items():
        try:
            torch.testing.assert_close(found[how], before, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            raise HostError(
                f"slot {slot}: the finished network differs {how} from the one that was trained"
                f" ({str(error).splitlines()[0]}); nothing was changed"
            ) from None
