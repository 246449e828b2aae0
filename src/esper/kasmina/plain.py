"""Conversion of a network with slots into a plain module, with a comparison of their outputs.

A seed becomes a ``torch.fx`` graph of torch modules: a child of its submodule and that submodule's forward
hook. Class, signature, attributes, containers and other hooks of the network do not change, and unpickling
the plain module needs no code of esper. A linear seed after a linear layer is merged into the layer's weight.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, fx, nn

from esper.kasmina.blueprints import Mirrored
from esper.kasmina.blueprints.tokens import Heads, causal_attention
from esper.kasmina.dry_run import call, tensors_in, untouched
from esper.kasmina.graft import Graft, pure_change
from esper.kasmina.host import Host
from esper.kasmina.network import MorphogeneticModel
from esper.kasmina.random_streams import TorchStream
from esper.kasmina.sites import GROWN, Output
from esper.kasmina.slot import RESERVED, SeedSlot, notice_hooks, slots_of
from esper.leyline import BlendOperator, BlueprintError, HostError, Stage

MERGED_TOLERANCE: Final = (1e-4, 1e-5)
"""Relative and absolute tolerance of outputs with merged weights, which sum in another order; other outputs
must be bit-equal.
"""

Undo = Callable[[], None]
Outputs = dict[str, list[Tensor]]
Leave = Callable[[Iterable[nn.Parameter]], None]


def finish(net: nn.Module, sample: Any = None, *, merge: bool = False, leave: Leave = lambda _: None) -> bool:
    """Turn all slots of ``net`` into plain modules and compare the outputs before and after the conversion.

    Args:
        net: Network with slots.
        sample: Input of the comparison; without a sample each seed is compared on synthetic features.
        merge: Add linear seeds after linear layers to the layers' weights; needs a sample.
        leave: Called with the parameters of merged seeds, which no longer exist.

    Returns:
        Whether seeds are left as graphs in the network.

    Raises:
        HostError: An output differs; the message names the slot, and the network is unchanged.
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
                if sample is None:
                    _compare_seed(slot)
                undone.append(_settle(submodule, slot))
            _compare(wanted, _outputs(net, sample), slot.site.name, exact=not merged)
    except BaseException:  # The network stays unchanged after Ctrl-C as well.
        for undo in reversed(undone):
            undo()
        raise
    leave(merged)
    notice_hooks()
    return graphs


def harvest(model: MorphogeneticModel) -> nn.Module:
    """Return a plain copy of the network with its fossilized seeds; other seeds are left out.

    Example:
        >>> net = harvest(env.model)
    """
    host = copy.deepcopy(model.host)
    stages = dict(zip(model.slot_config.slot_ids, model.table.stage[0], strict=True))
    for slot in slots_of(host).values():
        if slot.graft is not None:
            slot.graft.stream = None  # The plain module draws dropout masks from the global generator.
        if slot.graft is not None and stages[slot.site.name] != Stage.FOSSILIZED:
            slot.remove()
    finish(host, host.sample_input(2) if isinstance(host, Host) else None)
    return host


@contextmanager
def plain_on_error(finish: Callable[[], nn.Module]) -> Iterator[None]:
    """Call ``finish`` after an error, so that the caller gets a plain network with the training so far."""
    try:
        yield
    except BaseException as error:
        try:
            finish()
        except Exception as other:
            error.add_note(f"esper could not make the network plain again: {other}")
        raise


# --- one slot -----------------------------------------------------------------------------------------------


def _without(submodule: nn.Module, slot: SeedSlot) -> Undo:
    """Remove an empty slot."""
    del submodule._modules[RESERVED]
    return lambda: submodule.add_module(RESERVED, slot)


def _settle(submodule: nn.Module, slot: SeedSlot) -> Undo:
    """Replace the slot by the seed's graph, and the slot's hook by the graph."""
    graft = slot.held
    assert slot.handle is not None
    graph = graph_of(graft, slot.site.output).train(submodule.training)
    number, name = slot.handle.id, GROWN
    while hasattr(submodule, name):
        name += "_more"
    del submodule._modules[RESERVED]
    submodule.add_module(name, graph)
    submodule._forward_hooks[number] = graph

    def undo() -> None:
        del submodule._modules[name]
        submodule.add_module(RESERVED, slot)
        submodule._forward_hooks[number] = graft.on_forward

    return undo


def _is_linear(net: nn.Module, submodule: nn.Module, slot: SeedSlot) -> bool:
    """Return whether the seed is a linear map after a linear layer whose weight has one name."""
    graft = slot.held
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
def _merge(net: nn.Module, slot: SeedSlot, sample: Any, wanted: Outputs) -> Undo | None:
    """Merge the seed's linear map M into the layer: W ← (1 + alpha·M)·W and b likewise; return None if the
    rounding error is too large.

    Weights in bfloat16 have too few digits for the merged sum, and a deep network may amplify the rounding
    error.
    """
    layer = net.get_submodule(slot.site.path)
    assert isinstance(layer, nn.Linear)
    graft = slot.held
    kept = [(p, p.clone()) for p in layer.parameters(recurse=False)]
    for parameter, before in kept:
        rows = before.double().view(layer.out_features, -1).T
        change = graft.seed.double()(rows).T.reshape(before.shape)
        parameter.copy_(before.double() + graft.alpha.double() * change)
    graft.seed.to(layer.weight.dtype)
    slot.remove()
    del layer._modules[RESERVED]

    def undo() -> None:
        for parameter, before in kept:
            parameter.data.copy_(before)
        layer.add_module(RESERVED, slot)
        slot.hold(graft)

    try:
        _compare(wanted, _outputs(net, sample), slot.site.name, exact=False)
    except HostError:
        undo()
        return None
    return undo


# --- a seed as a graph ------------------------------------------------------------------------------------


class _Hook(nn.Module):
    """Forward hook of a slot in operations that ``torch.fx`` can trace."""

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
        change = pure_change(self.operator, seen, self.seed, self.gate).to(seen.dtype)
        grown = seen + change if self.full else torch.addcmul(seen, self.alpha.to(seen.dtype), change)
        return self.where.replaced(output, grown.transpose(*self.swap) if self.swap else grown)


class _Tracer(fx.Tracer):
    """Tracer that traces through modules of esper and their subclasses; other modules stay modules of the
    graph.
    """

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        bases = {base for inner in m.modules() for base in type(inner).__mro__}
        return not any(base.__module__.split(".")[0] == "esper" for base in bases)


def graph_of(graft: Graft, where: Output) -> fx.GraphModule:
    """Return the seed as a hook ``(module, args, output)`` of torch modules that shares its parameters."""
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
        node.type = None  # Type annotations given as text cannot be pickled.
    graph._tracer_cls = None  # The tracer class would be pickled by its name in esper.
    return fx.GraphModule(hook, graph, class_name="Grown")


@contextmanager
def _plain_attention(graft: Graft) -> Iterator[None]:
    """Use plain attention inside the context: flex attention branches on tensors and cannot be traced."""
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
    """Return all tensors that ``net`` returns for the sample, in training and evaluation mode, with and
    without gradients.
    """
    found: Outputs = {}
    if sample is None:
        return found
    for training in (False, True):
        for grad in (False, True):
            with untouched(net, training=training), torch.set_grad_enabled(grad):
                result = [t.detach().clone() for t in tensors_in(call(net, sample))]
            found[f"in {'train' if training else 'eval'} mode with{'' if grad else 'out'} grad"] = result
    return found


def _compare_seed(slot: SeedSlot) -> None:
    """Compare a seed's graph with the seed on synthetic features, in training and evaluation mode."""
    graft = slot.held
    like = next(graft.parameters(), graft.alpha)
    h = slot.sample_features(like, as_they_are=True)
    graph = graph_of(graft, Output("tensor"))
    mode, part = graft.training, graft.participation
    for training in (False, True):
        with untouched(graft, training=training), torch.no_grad():
            with TorchStream(0):
                wanted = graft(h) if part.active else h
            with TorchStream(0):
                found = graph.train(training)(None, None, h)
        if not torch.equal(found.nan_to_num(), wanted.nan_to_num()):
            raise HostError(
                f"slot {slot.site.name}: the graph of its seed differs from the seed that was trained;"
                " nothing was changed"
            )
    graft.train(mode)


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
