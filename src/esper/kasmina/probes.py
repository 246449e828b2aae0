"""Probes of a network: forward passes with another size of input, with traced outputs, or with a changed
last token.

They show which axes of features are batch, tokens and width, which outputs the network reads, and whether the
network is causal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor, nn

from esper.kasmina.dry_run import Call, dry_forward, tensors_in
from esper.kasmina.feature_output import Output, find_output, outputs_in
from esper.leyline.errors import HostError

_SIZES: Final[Mapping[int, tuple[tuple[int, ...], ...]]] = {
    2: ((1,),),
    3: ((1,), (2,)),
    4: ((2, 3), (1, 2)),
    5: ((2, 3, 4), (1, 2, 3)),
}
"""Axes of an input that may be its size, such as height and width, by number of axes; the likeliest first."""
_SELECTIONS: Final = tuple(f"{name}Backward0" for name in ("Softmax", "Topk", "Max", "Sort", "Gather"))
"""Operations that turn scores into a selection of experts or positions."""
_NOISE: Final = 64
"""Largest difference of two outputs by rounding, in units of the precision of their dtype."""


class Probes:
    """Recorded forward passes of a network without slots; every pass runs when it is first needed.

    Args:
        net: Network to run; unchanged afterwards.
        sample: Input that the network is called with.
    """

    def __init__(self, net: nn.Module, sample: Any) -> None:
        self.net, self.sample = net, sample
        self.calls, self.result = dry_forward(net, sample)
        self.by_path = _by_path(self.calls)
        """Calls of every submodule, in the order in which the first calls end."""

    # --- axes ---------------------------------------------------------------------------------------------

    @cached_property
    def _resized(self) -> tuple[dict[str, list[Call]], dict[str, list[Call]]]:
        """Calls with another batch size, and calls with another size of images or number of tokens; empty if
        the network accepts no other."""
        return self._first_accepted(_other_batches(self.sample)), self._first_accepted(_others(self.sample))

    def _first_accepted(self, samples: Iterator[Any]) -> dict[str, list[Call]]:
        for sample in samples:
            try:
                return _by_path(dry_forward(self.net, sample)[0])
            except HostError:
                continue
        return {}

    def varying_axes(self, path: str, output: Output) -> tuple[set[int], set[int]]:
        """Return the axes of the features at ``path`` that change with the batch size, and those that change
        with the size of the input."""
        features = output.features(self.by_path[path][0].output)
        found = []
        for calls in self._resized:
            other = output.features(calls[path][0].output) if path in calls else features
            pairs = zip(features.shape, other.shape, strict=False)
            axes = {axis for axis, (one, two) in enumerate(pairs) if one != two}
            found.append(axes if other.ndim == features.ndim else set[int]())
        return found[0], found[1]

    # --- dependence of the output -------------------------------------------------------------------------

    @cached_property
    def _graph(self) -> _Graph:
        return _Graph(self.net, self.sample)

    def is_read(self, path: str, output: Output) -> bool:
        """Return whether the output of the network depends on the features at ``path``."""
        if (path, output.key) in self._graph.read:
            return True

        def shift(at: str, value: Any) -> Any:
            return output.replaced(value, 2 * output.features(value) + 1) if at == path else value

        # Activation checkpointing may run outside of the graph, so the features are changed to make sure.
        found = tensors_in(dry_forward(self.net, self.sample, change=shift)[1])
        return not all(map(torch.equal, tensors_in(self.result), found))

    def is_hidden(self, path: str) -> bool:
        """Return whether a later layer with weights reads the output at ``path`` as features; false for the
        final head, and for routers, whose outputs only select or weigh other outputs.

        If the network returns nothing that has a gradient, every output counts as read.
        """
        output = find_output(self.by_path[path][0].output)
        place = (path, None if output is None else output.key)
        is_fed = place in self._graph.fed or not self._graph.read
        return is_fed and place not in self._graph.selecting

    @property
    def routers(self) -> set[str]:
        """Paths of the submodules whose outputs are scores for a selection."""
        return {path for path, _ in self._graph.selecting}

    # --- order of tokens ----------------------------------------------------------------------------------

    @cached_property
    def _changed_inputs(self) -> list[dict[str, list[Call]]]:
        """Calls after a change of the last entry of each tensor of the sample."""
        found = []
        for number in range(len(tensors_in(self.sample))):
            try:
                changed = dry_forward(self.net, _with_last_changed(self.sample, number))[0]
            except HostError:
                continue
            found.append(_by_path(changed))
        return found

    def is_causal(self, path: str, output: Output, swap_of: Callable[[str], tuple[int, int] | None]) -> bool:
        """Return whether tokens at ``path`` must not depend on later tokens.

        The features depend on some tensors of the sample. If for one of them no submodule returns earlier
        tokens that depend on its last entry, the network is causal. If there is no evidence it counts as
        causal.

        Args:
            path: Path of a submodule that returns tokens.
            output: Position of the features.
            swap_of: Function that returns the axes to transpose of the tokens that a submodule returns.
        """
        verdicts = [
            not self._mixes_backwards(changed, swap_of)
            for changed in self._changed_inputs
            if _changed_tokens(self.by_path, changed, path, output, None).any()
        ]
        return any(verdicts) or not verdicts

    def _mixes_backwards(
        self, changed: dict[str, list[Call]], swap_of: Callable[[str], tuple[int, int] | None]
    ) -> bool:
        for path, calls in self.by_path.items():
            output = find_output(calls[0].output)
            if output is not None and output.features(calls[0].output).ndim == 3:
                tokens = _changed_tokens(self.by_path, changed, path, output, swap_of(path))
                if tokens[:-1].any():
                    return True
        return False


def _by_path(calls: list[Call]) -> dict[str, list[Call]]:
    found: dict[str, list[Call]] = {}
    for each in calls:
        found.setdefault(each.path, []).append(each)
    return found


def _changed_tokens(
    before: Mapping[str, list[Call]],
    after: Mapping[str, list[Call]],
    path: str,
    output: Output,
    swap: tuple[int, int] | None,
) -> Tensor:
    """Return for every token at ``path`` whether its features differ between two forward passes."""
    if path not in after:
        return torch.zeros(1, dtype=torch.bool)
    one, two = (output.features(calls[path][0].output) for calls in (before, after))
    if one.shape != two.shape:
        return torch.zeros(1, dtype=torch.bool)
    one, two = (h.transpose(*swap) if swap else h for h in (one, two))
    limit = _NOISE * torch.finfo(one.dtype).eps * float(one.abs().max())
    return ((one - two).abs() > limit).transpose(0, 1).flatten(1).any(1)


# --- other samples ----------------------------------------------------------------------------------------


def _mapped(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a sample with other tensors."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {name: _mapped(value, function) for name, value in tree.items()}
    if type(tree) in (tuple, list):
        return [_mapped(value, function) for value in tree]
    return tree


def _other_batches(sample: Any) -> Iterator[Any]:
    """Return the sample with twice as many rows."""
    tensors = [tensor for tensor in tensors_in(sample) if tensor.ndim]
    if tensors:
        rows = len(tensors[0])
        yield _mapped(sample, lambda t: _doubled(t, t.shape.index(rows)) if rows in t.shape else t)


def _others(sample: Any) -> Iterator[Any]:
    """Return samples of twice and of half the size, for every choice of axes that may be the size."""
    lead = next((tensor for tensor in tensors_in(sample) if tensor.ndim in _SIZES), None)
    if lead is None:
        return
    for axes in _SIZES[lead.ndim]:
        lengths = {lead.shape[axis] for axis in axes}
        for change in (_doubled, _halved):

            def resized(
                tensor: Tensor, axes: Any = axes, lengths: Any = lengths, change: Any = change
            ) -> Tensor:
                if tensor.ndim != lead.ndim:
                    first = int(tensor.ndim > 0 and len(tensor) == len(lead))
                    axes = [a for a in range(first, tensor.ndim) if tensor.shape[a] in lengths]
                for axis in axes:
                    tensor = change(tensor, axis)
                return tensor

            yield _mapped(sample, resized)


def _doubled(tensor: Tensor, axis: int) -> Tensor:
    return torch.cat([tensor, tensor], axis)


def _halved(tensor: Tensor, axis: int) -> Tensor:
    return tensor.narrow(axis, 0, max(1, tensor.shape[axis] // 2))


def _with_last_changed(sample: Any, number: int) -> Any:
    """Return the sample with another value at the end of every row of its tensor ``number``."""
    wanted = tensors_in(sample)[number]
    if wanted.ndim < 2 or not wanted.numel():
        return sample
    rows = wanted.clone().flatten(1)
    last = rows[:, -1]
    if wanted.is_floating_point():
        last += 1 + 3 * wanted.abs().max()
    elif wanted.dtype is torch.bool:
        last.logical_not_()
    else:
        # Values that occur in the sample are valid ids.
        low, high = (wanted.min(), wanted.max()) if wanted.min() < wanted.max() else (0, 1)
        last.copy_(torch.where(last == low, high, low))
    changed = rows.view(wanted.shape)
    return _mapped(sample, lambda tensor: changed if tensor is wanted else tensor)


# --- graph of gradients -----------------------------------------------------------------------------------


class _Graph:
    """Graph of gradients of a forward pass in which a zero was added to every output of a submodule.

    Args:
        net: Network to run; unchanged afterwards.
        sample: Input that the network is called with.
    """

    def __init__(self, net: nn.Module, sample: Any) -> None:
        self._zeros: dict[int, tuple[Tensor, tuple[str, Any]]] = {}
        frozen = [p for p in net.parameters() if p.is_floating_point() and not p.requires_grad]
        try:
            for parameter in frozen:
                parameter.requires_grad_(True)
            result = dry_forward(net, sample, change=self._mark)[1]
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
        order = _topological([tensor.grad_fn for tensor in tensors_in(result) if tensor.grad_fn])
        self._consumers: dict[Any, list[Any]] = {}
        self._weights: set[Any] = set()
        """Nodes that only depend on parameters with more than one entry."""
        for node in order:
            for each in _inputs(node):
                self._consumers.setdefault(each, []).append(node)
            if self._is_weight(node):
                self._weights.add(node)
        feeding = set[Any]()
        for node in reversed(order):
            if any(each in feeding or self._uses_weight(each) for each in self._consumers.get(node, [])):
                feeding.add(node)
        marked = [(node, place) for node in order if (place := self._place(node)) is not None]
        self.read = {place for _, place in marked}
        """Outputs that the output of the network depends on, as paths and keys in the return value."""
        self.fed = {place for node, place in marked if node in feeding}
        """Outputs that a later operation with weights reads."""
        self.selecting = {place for node, place in marked if self._only_selects(node)}
        """Outputs that are only scores for a selection."""

    def _mark(self, path: str, value: Any) -> Any:
        for output in list(outputs_in(value)):
            features = output.features(value)
            zero = torch.zeros((), dtype=features.dtype, device=features.device, requires_grad=True)
            self._zeros[id(zero)] = zero, (path, output.key)
            value = output.replaced(value, features + zero)
        return value

    def _place(self, node: Any) -> tuple[str, Any] | None:
        """Return the output to which the zero of a leaf was added; None for other nodes."""
        return self._zeros.get(id(getattr(node, "variable", None)), (None, None))[1]

    def _is_weight(self, node: Any) -> bool:
        variable = getattr(node, "variable", None)
        if variable is not None:
            return variable.numel() > 1
        places = [(each, self._place(each)) for each in _inputs(node)]
        others = [e for e, place in places if place is None or "parametrizations" not in place[0].split(".")]
        return bool(others) and all(each in self._weights for each in others)

    def _uses_weight(self, node: Any) -> bool:
        before = _inputs(node)
        return len(before) > 1 and any(each in self._weights for each in before)

    def _only_selects(self, mark: Any) -> bool:
        """Return whether every use of an output is the selection of other outputs."""
        waiting, is_selecting = list(self._consumers[mark]), False
        while waiting:
            for each in self._consumers.get(waiting.pop(), []):
                if each.name() in _SELECTIONS:
                    is_selecting = True
                elif len([node for node in _inputs(each) if self._place(node) is None]) > 1:
                    return False
                else:
                    waiting.append(each)
        return is_selecting


def _inputs(node: Any) -> list[Any]:
    return [each for each, _ in node.next_functions if each is not None]


def _topological(ends: list[Any]) -> list[Any]:
    """Return all nodes of a graph of gradients, every node behind those that it depends on."""
    order, seen = list[Any](), set[Any]()
    for end in ends:
        waiting = [] if end in seen else [(end, iter(_inputs(end)))]
        seen.add(end)
        while waiting:
            following = next((each for each in waiting[-1][1] if each not in seen), None)
            if following is None:
                order.append(waiting.pop()[0])
            else:
                seen.add(following)
                waiting.append((following, iter(_inputs(following))))
    return order
