"""Expanded model: which parameters train, the old model in a context, report, controls, and the plain model
at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn

from esper.growth.batch_training import Loss
from esper.growth.growth import Growth
from esper.kasmina.edits import BlockContainer
from esper.kasmina.slot import notice_hooks, stop_checking, without_slots
from esper.kasmina.transaction import Transaction, uninterrupted
from esper.leyline.errors import EsperError

if TYPE_CHECKING:
    from esper.growth.diagnosis_report import Diagnosis
    from esper.growth.expand_report import Comparison, ExpansionReport

EXPANDED: Final[WeakSet[nn.Module]] = WeakSet()
"""Models with an expansion that is not finished."""
RATES: Final[Mapping[str, Sequence[float]]] = {
    "expanded": (1e-3,),
    "existing": (1e-3,),
    "lora": (1e-3,),
    "full": (1e-3, 1e-4),
}
"""Learning rates of each arm of ``compare``."""
_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Request(NamedTuple):
    """Arguments of ``expand`` that later calls need."""

    kind: str
    """``blocks``, ``widen`` or ``rank``."""
    size: int
    train: str
    sample: Any


class InsertedBlock(NamedTuple):
    """New block, with the container that it is in and the block in front of it, of which it is a copy."""

    container: BlockContainer
    before: nn.Module
    block: nn.Module


class Expanded:
    """Model with new parameters; returned by ``esper.expand``.

    Args:
        growth: Growth of the model, which is finished if blocks were added.
        request: What was added.
        inserted: New blocks, in the order of the forward pass.
        old: Ids of the parameters and buffers of the model before the expansion.
        flags: Whether each of the old parameters required a gradient.

    Example:
        >>> with expanded.original():
        ...     print(evaluate(expanded.model))
    """

    def __init__(
        self,
        growth: Growth,
        request: Request,
        inserted: Sequence[InsertedBlock],
        old: set[int],
        flags: Mapping[nn.Parameter, bool],
    ) -> None:
        self.model = growth.net
        """The model itself, which was changed in place."""
        self.growth = growth
        """Growth that holds new hidden units or low-rank weights; ``growth.save_adapter(folder)`` writes
        low-rank weights for PEFT. It is finished if blocks were added."""
        self.places = tuple(growth.slots)
        """Names of the places in the old model: copied blocks, widened blocks, or linear layers."""
        self.request, self._inserted = request, inserted
        named = dict(self.model.named_parameters())
        self._flags = {name: flags[p] for name, p in named.items() if id(p) in old}
        if request.train == "new":
            for name in self._flags:
                named[name].requires_grad_(False)
        self.trainable = tuple(name for name, p in named.items() if p.requires_grad)
        """Names of all parameters of the model that train."""
        self.new = tuple(name for name in named if name not in self._flags)
        """Names of the parameters that were added."""
        self._kept = {name: b.cpu().clone() for name, b in self.model.named_buffers() if id(b) in old}
        self._sums: dict[str, int] = {}
        if request.train == "all":
            self._kept |= {name: named[name].detach().cpu().clone() for name in self._flags}
        else:
            self._sums = {name: _checksum(named[name]) for name in self._flags}
        self.diagnosis: Diagnosis | None = None
        """Diagnosis that chose the places, for ``where="diagnose"``."""
        self._forwards = {type(module).forward for module in self.model.modules()}
        self._is_original = self._is_finished = False
        EXPANDED.add(self.model)

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that train, for an optimiser; after ``fully_shard`` they are its shards."""
        named = dict(self.model.named_parameters())
        return [named[name] for name in self.trainable]

    def new_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that were added."""
        named = dict(self.model.named_parameters())
        return [named[name] for name in self.new]

    def __repr__(self) -> str:
        kind, size, _, _ = self.request
        numbers = [sum(p.numel() for p in each) for each in (self.parameters(), self.model.parameters())]
        first, *rest = self.places
        places = f"{first} … {rest[-1]} ({len(rest) + 1} places)" if len(rest) > 2 else ", ".join(self.places)
        return (
            f"Expanded({type(self.model).__name__}: {kind}={size} at {places};"
            f" {numbers[0]:,} of {numbers[1]:,} parameters train)"
        )

    # --- the old model ------------------------------------------------------------------------------------

    @contextmanager
    def original(self) -> Iterator[nn.Module]:
        """Switch back to the old model inside the context: its outputs equal those before the expansion, bit
        for bit.

        New blocks are removed and inserted again; hidden units and low-rank weights are switched off. New
        parameters and their optimiser state are unchanged. Contexts may be nested.

        Yields:
            The model, which is the same object.

        Raises:
            EsperError: The expansion is finished, or an old parameter has changed although it was frozen.

        Example:
            >>> with expanded.original() as model:
            ...     text = model.generate(**prompt)
        """
        self._check_unfinished("original")
        if self._is_original:
            yield self.model
            return
        self._check_weights()
        network = self.growth.network
        tensors = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        old = [(tensors[name], value) for name, value in self._kept.items()]
        now = [(tensor, tensor.detach().clone()) for tensor, _ in old]
        parts = [] if self._inserted else network.without(*range(len(network.slots)))
        is_switched = False
        try:
            with Transaction([self.model]) as change, uninterrupted():
                change.keep(tensor for tensor, _ in old)
                for each in self._inserted:
                    each.container.remove(each.block)
                _copy_values(old)
                notice_hooks(self._forwards)
                self._is_original = is_switched = True
            with network.taking_part(parts) if parts else nullcontext():
                yield self.model
        finally:
            if is_switched:
                with uninterrupted():
                    for each in self._inserted:
                        each.container.insert(each.before, each.block.train(each.before.training))
                    _copy_values(now)
                    notice_hooks(self._forwards)
                    self._is_original = False

    def _check_weights(self) -> None:
        """Raise EsperError if the old weights are not known or not the same as at birth."""
        named = dict(self.model.named_parameters())
        if self.request.train == "all" and any(hasattr(p, "full_tensor") for p in named.values()):
            raise EsperError(
                "the old weights cannot be put back into a sharded model; with train='all', keep a copy of the"
                " old model instead of original()"
            )
        changed = [name for name, before in self._sums.items() if _checksum(named[name]) != before]
        if changed:
            raise EsperError(
                f"{len(changed)} old parameters have changed although they were frozen, the first is"
                f" {changed[0]}, so the old model is not there any more; expand with train='all' to train or"
                " load them"
            )

    # --- measurements -------------------------------------------------------------------------------------

    def report(self, *, new: Iterable[Any], old: Iterable[Any], loss: Loss) -> ExpansionReport:
        """Measure what was gained on new data and lost on old data, against the old model.

        Args:
            new: Batches of the data that the expansion was trained for, held out from its training.
            old: Batches of data that the old model was trained for.
            loss: Loss function, as in ``esper.diagnose``: ``loss(model(*inputs), target)`` for batches
                ``(inputs…, target)``, else ``loss(model, batch)``.

        Returns:
            Losses with and without the expansion, and their paired difference with its standard error over
            batches; the first 100 batches of each loader are used.

        Example:
            >>> print(expanded.report(new=new_batches, old=old_batches, loss=loss))
        """
        from esper.growth.expand_report import report_of  # noqa: PLC0415  expand_report.py imports this

        return report_of(self, new, old, loss)

    def compare(
        self,
        train_loader: Iterable[Any],
        *,
        new: Iterable[Any],
        old: Iterable[Any],
        loss: Loss,
        steps: int,
        rates: Mapping[str, Sequence[float]] = RATES,
    ) -> Comparison:
        """Train the same expansion and its alternatives, each from the old model, on the same batches.

        The arms are ``"expanded"``: this expansion from birth; ``"existing"``: as many existing blocks, those
        that were copied (or all weights at the places that were changed); ``"lora"``: LoRA of equal size in
        all linear layers of all blocks; ``"full"``: all weights. Each trains on a copy of the
        old model, by AdamW with clipped gradients and a learning rate that rises and then falls to zero.

        Args:
            train_loader: Training batches of the new data.
            new: Batches of new data to measure, held out from training.
            old: Batches of old data to measure.
            loss: Loss function, as in ``report``.
            steps: Number of training steps of every arm.
            rates: Learning rates to try, by arm; arms that are not named are left out.

        Returns:
            Table with trained parameters, and losses on new and old data, of every arm and rate.

        Raises:
            EsperError: An arm is unknown, or cannot be built.

        Example:
            >>> print(expanded.compare(train, new=held_out, old=old_batches, loss=loss, steps=500))
        """
        from esper.growth.expand_report import comparison_of  # noqa: PLC0415  expand_report.py imports this

        return comparison_of(self, train_loader, new, old, loss, steps, rates)

    def old_model(self) -> nn.Module:
        """Return a copy of the old model, in which every floating-point parameter requires a gradient."""
        with self.original():
            twin = without_slots(self.model)
        stop_checking(twin)
        for parameter in twin.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        return twin

    # --- end ----------------------------------------------------------------------------------------------

    def finish(self, optimizer: Any = None) -> nn.Module:
        """Return the model as a plain module without a trace of Esper.

        Blocks have been plain blocks from the start, so the optimiser continues. Hidden units become part of
        their layers, and low-rank weights are added to the weights of theirs; the outputs are compared. Old
        parameters require a gradient again if they did before the expansion.

        Args:
            optimizer: Optimiser of the model, or a list of optimisers, in which parameters of hidden units and
                low-rank weights are replaced; not needed for blocks. With ``train="new"`` none of its
                parameters is left, so make another one to continue.

        Returns:
            The model itself.

        Raises:
            EsperError: The outputs of the plain model differ, or the model is sharded. After this error the
                model is unchanged.

        Example:
            >>> expanded.finish().save_pretrained("expanded")
        """
        self._check_unfinished("finish")
        if self._is_original:
            raise EsperError("finish() was called inside original(); leave that context first")
        if not self._inserted:
            if any(hasattr(p, "full_tensor") for p in self.model.parameters()):
                raise EsperError(
                    "new hidden units and low-rank weights of a sharded model cannot join its layers; load the"
                    " gathered state dict into a model that was expanded in the same way and not sharded"
                )
            if optimizer is not None:
                self.growth.bind(optimizer)
            self.growth.finish()
        with uninterrupted():
            for name, parameter in self.model.named_parameters():
                if name in self._flags:
                    parameter.requires_grad_(self._flags[name])
            EXPANDED.discard(self.model)
            self._is_finished = True
        return self.model

    def _check_unfinished(self, what: str) -> None:
        if self._is_finished:
            raise EsperError(
                f"{what}() came after finish(): the model is a plain module without an old model"
            )


@torch.no_grad()
def _copy_values(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for tensor, value in pairs:
        tensor.copy_(value)


def _checksum(parameter: Tensor) -> int:
    """Return the sum of the bits of a parameter as integers; equal on every device, and for its shards."""
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    values = whole.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    return int(values.view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64))
