"""Transactions: changes of networks and optimisers that are made completely or not at all.

Any exception can end a change half-way: an error in a user's forward pass, or Ctrl-C between any two lines. A
transaction copies the structure of networks and optimisers before a change, and restores the structure if the
change fails.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy
from functools import partial, wraps
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.leyline import SlotTable

_PARTS: Final = [name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set)]
"""Attributes of every module that hold its children, tensors and hooks."""
_SIZES: Final = ("in_features", "out_features", "in_channels", "out_channels", "num_features")
_FLAGS: Final = ("training", "momentum", "use_nested_tensor", *_SIZES)
"""Further attributes of a user's modules that Esper changes."""
_COUNTS: Final = ("layer", "block", "depth", "hidden_group")
"""Parts of the names of attributes that count the blocks of a container or have one entry per block."""
_WIDTHS: Final = ("intermediate", "ffn", "inner", "mlp", "d_ff", "feedforward")
"""Parts of the names of attributes that state the number of hidden units."""
_MUTABLE: Final = (dict, set, list, deque, WeakSet, WeakKeyDictionary)


class Transaction(AbstractContextManager["Transaction"]):
    """State of networks, optimisers and other objects before a change, which is restored if the change fails.

    The state consists of children, hooks, training modes, layer numbers, configurations and buffers of
    networks, parameter groups and states of optimisers, attributes of other objects with the slot tables in
    them, and torch's random state, gradient mode and switch of fused transformer layers. Weights are restored
    only if ``keep`` was called before they changed.

    Args:
        nets: Networks that the change affects.
        optimisers: Optimisers that the change affects.
        objects: Other objects that the change affects; dicts and lists in their attributes are copied one
            level deep.

    Example:
        >>> with Transaction([net], [optimizer]):
        ...     change(net, optimizer)
    """

    def __init__(
        self,
        nets: Iterable[nn.Module] = (),
        optimisers: Iterable[Optimizer] = (),
        objects: Iterable[object] = (),
    ) -> None:
        self._structure: list[Callable[[], object]] = []
        self._values: list[Callable[[], object]] = []
        self._last: list[Callable[[], object]] = []
        self._tables: list[SlotTable] = []
        self._random, self._grad = torch.get_rng_state(), torch.is_grad_enabled()
        self._fused = torch.backends.mha.get_fastpath_enabled()
        self.include(nets, optimisers, objects)

    def include(
        self,
        nets: Iterable[nn.Module] = (),
        optimisers: Iterable[Optimizer] = (),
        objects: Iterable[object] = (),
    ) -> None:
        """Add networks, optimisers and other objects before the change affects them."""
        for module in {module: None for net in nets for module in net.modules()}:
            attributes = vars(module)
            flags = {
                n: v
                for n, v in attributes.items()
                if n in _FLAGS
                or n in _PARTS
                or (isinstance(v, int) and (numbers_layers(n) or names_width(n)))
            }
            self._structure.append(partial(attributes.update, flags))
            self.keep_containers(attributes[name] for name in _PARTS)
            self.keep(module.buffers(recurse=False))
            if type(module).__module__.startswith("esper."):
                self._copy_attributes(module)
            if hasattr(attributes.get("config"), "__dict__"):
                self._copy_attributes(attributes["config"])
        for optimiser in optimisers:
            self._copy_attributes(optimiser)
            self.keep_containers(optimiser.param_groups)
            self.keep_containers(group["params"] for group in optimiser.param_groups)
        for each in objects:
            self._copy_attributes(each)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Add tensors before the change overwrites their values."""
        self._values += [partial(tensor.copy_, tensor.detach().clone()) for tensor in tensors]

    def afterwards(self, restore: Callable[[], object]) -> None:
        """Add a function that ``undo`` calls after everything else."""
        self._last.append(restore)

    def _copy_attributes(self, each: object) -> None:
        attributes = vars(each)
        self.keep_containers([attributes])
        self.keep_containers(value for value in attributes.values() if isinstance(value, _MUTABLE))
        for table in attributes.values():
            if isinstance(table, SlotTable) and not any(table is kept for kept in self._tables):
                self._tables.append(table)
                self._values.append(partial(table.assign, table.copy()))

    def keep_containers(self, containers: Iterable[Any]) -> None:
        """Add dicts, lists and sets before the change adds or removes elements."""
        self._structure += [partial(_refill, container, copy(container)) for container in containers]

    def undo(self) -> None:
        """Restore the state; Ctrl-C takes effect afterwards."""
        with uninterrupted(), torch.no_grad():
            for restore in (*self._structure, *reversed(self._values), *self._last):
                restore()
            torch.set_rng_state(self._random)
        self.restore_switches()

    def restore_switches(self) -> None:
        """Restore torch's gradient mode and its switch of fused transformer layers."""
        torch.set_grad_enabled(self._grad)
        torch.backends.mha.set_fastpath_enabled(self._fused)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.undo()


def numbers_layers(name: str) -> bool:
    """Return whether an attribute of this name may be the number of a block or the number of all blocks."""
    return any(part in name for part in _COUNTS)


def names_width(name: str) -> bool:
    """Return whether an attribute of this name may be the number of hidden units of an MLP."""
    return any(part in name for part in _WIDTHS)


def _refill(container: Any, content: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(content)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer Ctrl-C to the end of the context; Python raises ``KeyboardInterrupt`` in the main thread only."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[tuple[Any, ...]] = []
    with ExitStack() as stack:
        stack.callback(lambda: caught and handler(*caught[0]))
        stack.callback(signal.signal, signal.SIGINT, handler)
        signal.signal(signal.SIGINT, lambda *received: caught.append(received))
        yield


# --- methods that are undone if they fail -------------------------------------------------------------------

NO_CHANGE: Final = Transaction()
"""Transaction that records nothing: the value of ``_change`` while no public method runs."""


class Undoable(Protocol):
    """Object whose public methods change everything or nothing."""

    _change: Transaction

    def _transaction(self) -> Transaction:
        """Return the present state of everything that a method may change."""


G = TypeVar("G", bound=Undoable)
P = ParamSpec("P")
T = TypeVar("T")


def all_or_nothing(method: Callable[Concatenate[G, P], T]) -> Callable[Concatenate[G, P], T]:
    """Undo everything that a method has changed if the method fails, also by Ctrl-C."""

    @wraps(method)
    def undone_on_error(owner: G, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if owner._change is not NO_CHANGE:  # The transaction of the calling method includes this call.
            return method(owner, *args, **kwargs)
        with owner._transaction() as change:
            owner._change = change
            result = method(owner, *args, **kwargs)
            owner._change = NO_CHANGE
            return result

    return undone_on_error
