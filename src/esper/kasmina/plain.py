"""Conversion of a network with slots into a plain module, with a comparison of the outputs before and after.

A seed becomes a ``torch.fx`` graph of torch modules, which is a child and a forward hook of the submodule
that had the slot. Class, signature, attributes, containers and other hooks of the network do not change;
unpickling the plain module needs no code of Esper. If requested, a linear seed after a linear layer is merged
into the layer's weight.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch.utils.hooks import RemovableHandle

from esper.kasmina.auto_sites import GROWN
from esper.kasmina.blueprints import Mirrored
from esper.kasmina.blueprints.tokens import Heads, dense_attention
from esper.kasmina.dry_run import EVAL, Outputs, are_equal, compare, outputs_of, untouched
from esper.kasmina.edits import Argument
from esper.kasmina.enlargement import make_units_permanent
from esper.kasmina.feature_output import Output
from esper.kasmina.graft import BlockGraft, Graft, SideGraft, pure_change
from esper.kasmina.host import Host
from esper.kasmina.network import MorphogeneticModel
from esper.kasmina.older_states import FinishedGrowth, with_change
from esper.kasmina.optimizer_groups import OptimizerGroups
from esper.kasmina.random_streams import TorchStream
from esper.kasmina.slot import RESERVED, SeedSlot, notice_hooks, slots_of, stop_checking
from esper.kasmina.transaction import Transaction
from esper.leyline import BlendOperator, BlueprintError, EsperError, HostError, Stage


def finish(
    net: nn.Module, sample: Any = None, *, merge: bool = False, groups: OptimizerGroups | None = None
) -> None:
    """Turn all slots of ``net`` into plain modules and compare the outputs before and after the conversion.

    Args:
        net: Network with slots.
        sample: Input on which outputs are compared; without a sample each seed is compared on synthetic
            features.
        merge: Merge a linear seed after a linear layer into the weight of that layer; needs a sample.
        groups: Optimisers of the network, from which parameters of merged seeds are removed, and in which the
            state of enlarged layers is enlarged.

    Raises:
        HostError: An output differs after the conversion; the message names the slot, and the network is
            unchanged.
    """
    wanted = outputs_of(net, sample)
    while True:
        try:
            with Transaction([net]) as attempt:
                attempt.keep(slot_weights(net))
                record = FinishedGrowth(net)
                permanent = make_units_permanent(net)
                if permanent.enlarged:
                    compare(wanted, outputs_of(net, sample), permanent.slot, exact=False)
                merged = _convert(net, sample, wanted, record, merge=merge, exact=not permanent.enlarged)
                if permanent.equalise():
                    # Dropout of other sizes draws other masks, so outputs in training mode may differ.
                    in_eval = {how: tensors for how, tensors in wanted.items() if how.startswith(EVAL)}
                    compare(in_eval, outputs_of(net, sample), permanent.slot, exact=False)
            break
        except HostError:
            again = outputs_of(net, sample)
            stable = {how: tensors for how, tensors in wanted.items() if are_equal(tensors, again[how])}
            if stable.keys() == wanted.keys():
                raise
            wanted = stable
    if groups is not None:
        groups.leave(-1, merged)
        groups.enlarge(permanent.enlarged)
    stop_checking(net)
    record.register(net, permanent.enlarged)
    notice_hooks()


def _convert(
    net: nn.Module, sample: Any, wanted: Outputs, record: FinishedGrowth, *, merge: bool, exact: bool
) -> list[nn.Parameter]:
    """Turn all slots into plain modules; return the parameters of merged seeds. ``exact`` states whether
    outputs must be bit-equal until a seed is merged."""
    merged: list[nn.Parameter] = []
    for path, slot in slots_of(net).items():
        graft, submodule = slot.graft, net.get_submodule(path)
        if graft is None:
            del submodule._modules[RESERVED]
        elif isinstance(graft, BlockGraft):
            _finish_block(net, submodule, graft, record)
        elif merge and _is_linear(net, submodule, slot) and _merge(net, slot, sample, wanted):
            merged += graft.parameters()
            record.merged(path, graft.seed)
        else:
            if sample is None:
                _compare_seed(slot)
            _replace(path, submodule, slot, graph_of(graft, slot.site.output), record)
        compare(wanted, outputs_of(net, sample), slot.site.name, exact=exact and not merged)
    return merged


def settle(net: nn.Module, groups: OptimizerGroups | None = None) -> list[str]:
    """Turn all slots of ``net`` into plain modules without running the network.

    Args:
        net: Network with slots.
        groups: Optimisers of the network, in which the state of enlarged layers is enlarged.

    Returns:
        Names of the slots whose seeds cannot be traced; these seeds stay in the network as modules of Esper.
    """
    untraced = []
    record = FinishedGrowth(net)
    permanent = make_units_permanent(net)
    permanent.equalise()
    if groups is not None:
        groups.enlarge(permanent.enlarged)
    for path, slot in slots_of(net).items():
        submodule = net.get_submodule(path)
        if slot.graft is None:
            del submodule._modules[RESERVED]
            continue
        if isinstance(slot.graft, BlockGraft):
            _finish_block(net, submodule, slot.graft, record)
            continue
        try:
            _compare_seed(slot)
            hook: nn.Module = graph_of(slot.graft, slot.site.output)
        except EsperError:
            untraced.append(slot.site.name)
            hook = _hook_of(slot.graft, slot.site.output)
        _replace(path, submodule, slot, hook, record)
    stop_checking(net)
    record.register(net, permanent.enlarged)
    notice_hooks()
    return untraced


def slot_weights(net: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of the layers with slots, into which seeds may be merged."""
    return [p for path in slots_of(net) for p in net.get_submodule(path).parameters(recurse=False)]


def harvest(model: MorphogeneticModel) -> nn.Module:
    """Return a plain copy of the growing network ``model`` with its fossilized seeds only.

    Raises:
        HostError: The outputs of the plain copy differ from those of the growing network.

    Example:
        >>> net = harvest(env.model)
    """
    stages = dict(zip(model.slot_config.slot_ids, model.table.stage[0], strict=True))
    host = _copy_with(model.host, lambda slot: stages[slot.site.name] == Stage.FOSSILIZED)
    finish(host, host.sample_input(2) if isinstance(host, Host) else None)
    return host


def settled_copy(net: nn.Module) -> nn.Module:
    """Return a plain copy of a growing network with the seeds that take part in its forward pass."""
    plain = _copy_with(net, lambda slot: slot.held.participation.active)
    settle(plain)
    return plain


def _copy_with(net: nn.Module, is_kept: Callable[[SeedSlot], bool]) -> nn.Module:
    """Return a copy of a network with some of its seeds."""
    twin = copy.deepcopy(net)
    for slot in slots_of(twin).values():
        if slot.graft is not None:
            slot.graft.stream = None  # In a plain module, dropout draws from torch's global generator.
        if slot.graft is not None and not is_kept(slot):
            slot.remove()
    return twin


def _finish_block(net: nn.Module, submodule: nn.Module, graft: BlockGraft, record: FinishedGrowth) -> None:
    """Remove the slot of an inserted block; the block gets a hook if its alpha is not 1."""
    del submodule._modules[RESERVED]
    if graft.has_hook:
        path = next(name for name, module in net.named_modules() if module is graft.seed)
        graft.set_hook(False)
        child = blend(graft.seed, graft.argument, graft.site.output, graft.alpha)
        record.blended(path, child, float(graft.alpha))


# --- one slot -----------------------------------------------------------------------------------------------


def _replace(
    path: str, submodule: nn.Module, slot: SeedSlot, hook: nn.Module, record: FinishedGrowth
) -> None:
    """Replace the slot of the submodule ``path`` and its forward hook by the module ``hook``."""
    assert isinstance(slot.handle, RemovableHandle)
    del submodule._modules[RESERVED]
    name = _free_name(submodule)
    submodule.add_module(name, hook.train(submodule.training))
    submodule._forward_hooks[slot.handle.id] = hook
    record.replaced(path, name, hook)


def _free_name(module: nn.Module) -> str:
    name = GROWN
    while hasattr(module, name):
        name += "_more"
    return name


def _is_linear(net: nn.Module, submodule: nn.Module, slot: SeedSlot) -> bool:
    """Return whether the seed is a linear map after a linear layer whose weight is not shared with another
    layer."""
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
def _merge(net: nn.Module, slot: SeedSlot, sample: Any, wanted: Outputs) -> bool:
    """Merge the seed's linear map M into the weight W and bias b of its layer: W ← (1 + alpha·M)·W, and b
    likewise; return False, and change nothing, if the rounding error is too large, as in bfloat16."""
    layer, graft = slot.place.module, slot.held
    assert isinstance(layer, nn.Linear)
    try:
        with Transaction([layer]) as trial:
            trial.keep(layer.parameters(recurse=False))
            for parameter in layer.parameters(recurse=False):
                parameter.copy_(with_change(parameter, graft.seed, graft.alpha))
            slot.remove()
            del layer._modules[RESERVED]
            compare(wanted, outputs_of(net, sample), slot.site.name, exact=False)
    except HostError:
        return False
    return True


# --- a seed as a graph ------------------------------------------------------------------------------------


class _Hook(nn.Module):
    """Forward hook that runs a seed, in operations that ``torch.fx`` can trace."""

    alpha: Tensor

    def __init__(self, graft: Graft, where: Output) -> None:
        super().__init__()
        self.seed, self.gate, self.operator = graft.seed, graft.gate, graft.operator
        assert isinstance(graft, SideGraft)
        self.swap, self.where = graft.swap, where
        self.full = bool(graft.alpha == 1.0)
        self.register_buffer("alpha", graft.alpha)

    def forward(self, _module: Any, _args: Any, output: Any) -> Any:
        h = self.where.features(output)
        seen = h.transpose(*self.swap) if self.swap else h
        change = pure_change(self.operator, seen, self.seed, self.gate).to(seen.dtype)
        grown = seen + change if self.full else torch.addcmul(seen, self.alpha.to(seen.dtype), change)
        return self.where.replaced(output, grown.transpose(*self.swap) if self.swap else grown)


class _MaskedHook(_Hook):
    """Forward hook that runs a seed which does not attend to padding; it gets keyword arguments, too."""

    def __init__(self, graft: SideGraft, where: Output) -> None:
        super().__init__(graft, where)
        self.showing = graft.showing

    def forward(self, _module: Any, args: Any, kwargs: Any, output: Any) -> Any:  # type: ignore[override]
        with self.showing(args, kwargs, self.where.features(output)):
            return super().forward(_module, args, output)


class _BlockHook(nn.Module):
    """Forward hook that blends the output of a block with its input, in operations that ``torch.fx`` can
    trace."""

    alpha: Tensor

    def __init__(self, argument: Argument, where: Output, alpha: Tensor) -> None:
        super().__init__()
        self.argument, self.where = argument, where
        self.register_buffer("alpha", alpha)

    def forward(self, _module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        h = self.argument.value(args, kwargs)
        features = self.where.features(output)
        return self.where.replaced(output, h + self.alpha.to(h.dtype) * (features - h))


_MOST_ARGUMENTS: Final = 32
"""Number of arguments, all None, of a submodule whose seed is compared without a mask."""
_TRACING: Final = threading.Lock()
"""Lock held while a tracer of ``torch.fx`` replaces methods of ``nn.Module``, which affects all threads."""


class _Tracer(fx.Tracer):
    """Tracer that traces through modules of Esper and their subclasses; all other modules stay modules of the
    graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)  # Do not trace a network that another thread runs.
        return super().call_module(m, forward, args, kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        bases = {base for inner in m.modules() for base in type(inner).__mro__}
        return not any(base.__module__.split(".")[0] == "esper" for base in bases)


def _hook_of(graft: Graft, where: Output) -> nn.Module:
    return _MaskedHook(graft, where) if isinstance(graft, SideGraft) and graft.mask else _Hook(graft, where)


def graph_of(graft: Graft, where: Output) -> fx.GraphModule:
    """Return a graph of torch modules that is a forward hook and shares the parameters of the seed."""
    try:
        with _TRACING, _plain_attention(graft):
            return _traced(_hook_of(graft, where))
    except Exception as error:
        raise BlueprintError(
            f"the forward of {type(graft.seed).__name__} cannot be traced into torch modules: {error}. Write"
            " it without branches on values, or do not derive it from classes of esper"
        ) from error


def blend(block: nn.Module, argument: Argument, where: Output, alpha: Tensor) -> str:
    """Let a forward hook blend the output of ``block`` with its input; return the name of the hook."""
    with _TRACING:
        hook = _traced(_BlockHook(argument, where, alpha))
    name = _free_name(block)
    block.add_module(name, hook.train(block.training))
    block.register_forward_hook(hook, prepend=True, with_kwargs=True)
    return name


def _traced(hook: nn.Module) -> fx.GraphModule:
    graph = _Tracer().trace(hook)
    for node in graph.nodes:
        node.type = None  # String annotations of graph nodes cannot be pickled.
    graph._tracer_cls = None  # The pickled graph must not refer to a class of Esper.
    return fx.GraphModule(hook, graph, class_name="Grown")


@contextmanager
def _plain_attention(graft: Graft) -> Iterator[None]:
    """Replace flex attention by plain attention inside the context, because flex attention branches on
    tensors and cannot be traced."""
    heads = [(m, m.attend) for m in graft.modules() if isinstance(m, Heads)]
    for module, _ in heads:
        module.attend = dense_attention
    try:
        yield
    finally:
        for module, attend in heads:
            module.attend = attend


# --- comparing --------------------------------------------------------------------------------------------


def _compare_seed(slot: SeedSlot) -> None:
    """Raise HostError unless a seed and its graph return the same on synthetic features, in training and
    evaluation mode."""
    graft = slot.held
    like = next(graft.parameters(), graft.alpha)
    h = slot.sample_features(like, as_they_are=True)
    assert isinstance(graft, SideGraft)
    graph = graph_of(graft, Output("tensor"))
    args, kwargs = (None,) * _MOST_ARGUMENTS, [dict[str, Any]()] if graft.mask else []
    mode, part = graft.training, graft.participation
    for training in (False, True):
        with untouched(graft, training=training), torch.no_grad():
            with TorchStream(0), graft.showing(args, {}, h) if graft.mask else nullcontext():
                wanted = graft(h) if part.active else h
            with TorchStream(0):
                found = graph.train(training)(None, args, *kwargs, h)
        if not torch.equal(found.nan_to_num(), wanted.nan_to_num()):
            raise HostError(
                f"slot {slot.site.name}: the graph of its seed differs from the seed that was trained;"
                " nothing was changed"
            )
    graft.train(mode)
