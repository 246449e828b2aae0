"""Expanded model: which parameters train, the old model in a context, gain and loss against alternatives, and
the plain model at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn

from esper.growth.batch_training import Loss, check_loader, untouched_streams
from esper.growth.diagnosis_report import Diagnosis
from esper.growth.expand_report import Arm, Comparison, changes, probes_of, size_of, train_arm, trained_by
from esper.growth.growth import Growth
from esper.kasmina.slot import stop_checking, without_slots
from esper.kasmina.transaction import uninterrupted
from esper.leyline.errors import EsperError, UnknownNameError

EXPANDED: Final[WeakSet[nn.Module]] = WeakSet()
"""Models with an expansion that is not finished."""
RATES: Final = {"expanded": (1e-3,), "existing": (1e-3,), "lora": (1e-3,), "full": (1e-3, 1e-4)}
"""Learning rates of each arm of ``compare``."""
_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Request(NamedTuple):
    """Arguments of ``expand`` that are needed later."""

    kind: str
    """``blocks``, ``widen`` or ``rank``."""
    size: int
    train: str
    sample: Any


class Expanded:
    """Model with new parameters; returned by ``esper.expand``.

    Args:
        growth: Growth of the model, whose seeds are the new parameters.
        request: What was added.
        flags: Whether each of the old parameters required a gradient.
        buffers: Ids of the old buffers.

    Example:
        >>> with expanded.original():
        ...     print(evaluate(expanded.model))
    """

    def __init__(
        self, growth: Growth, request: Request, flags: Mapping[nn.Parameter, bool], buffers: set[int]
    ) -> None:
        self.model = growth.net
        """The model itself, which was changed in place."""
        self.growth = growth
        """Growth that holds new hidden units or low-rank weights; ``growth.save_adapter(folder)`` writes
        low-rank weights for PEFT. It is finished if blocks were added."""
        self.places = tuple(growth.slots)
        """Names of the places in the old model: copied blocks, widened blocks, or linear layers."""
        self.diagnosis: Diagnosis | None = None
        """Diagnosis that chose the places, for ``where="diagnose"``."""
        self.request = request
        self._blocks = []
        if request.kind == "blocks":
            self._blocks = [(slot.place, slot.held.seed) for slot in growth.network.slots]
            growth.finish(merge=False)
        named = dict(self.model.named_parameters())
        self._flags = {name: flags[p] for name, p in named.items() if p in flags}
        self.new = tuple(name for name in named if name not in self._flags)
        """Names of the parameters that were added."""
        for name in self._flags if request.train == "new" else ():
            named[name].requires_grad_(False)
        self.trainable = tuple(name for name, p in named.items() if p.requires_grad)
        """Names of all parameters of the model that train."""
        self._kept = {name: b.cpu().clone() for name, b in self.model.named_buffers() if id(b) in buffers}
        self._sums = {name: _checksum(named[name]) for name in self._flags if request.train == "new"}
        if request.train == "all":
            self._kept |= {name: named[name].detach().cpu().clone() for name in self._flags}
        self._is_original = self._is_finished = False
        EXPANDED.add(self.model)

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that train, for an optimiser; after ``fully_shard`` they are its shards."""
        named = dict(self.model.named_parameters())
        return [named[name] for name in self.trainable]

    def __repr__(self) -> str:
        trained, (first, *rest) = sum(p.numel() for p in self.parameters()), self.places
        places = f"{first} … {rest[-1]}" if rest else first
        what = f"{type(self.model).__name__}: {self.request.kind}={self.request.size} at {places}"
        return f"Expanded({what}; {trained:,} of {size_of(self.model):,} parameters train)"

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
        tensors = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        self._check_weights(tensors)
        now = [(tensors[name], tensors[name].detach().clone()) for name in self._kept]
        network = self.growth.network
        parts = network.without(*range(len(network.slots)))
        try:
            self._switch([(tensors[name], value) for name, value in self._kept.items()], on=False)
            with nullcontext() if self._blocks else network.taking_part(parts):
                yield self.model
        finally:
            try:
                self._switch(now, on=True)
            except BaseException:  # Ctrl-C, before it was deferred.
                self._switch(now, on=True)
                raise

    @torch.no_grad()
    def _switch(self, values: Sequence[tuple[Tensor, Tensor]], *, on: bool) -> None:
        """Insert or remove the new blocks, and copy values into old parameters and buffers; Ctrl-C takes
        effect afterwards. Does nothing if the model is switched already."""
        with uninterrupted():
            for place, block in self._blocks if self._is_original is on else ():
                assert place.container is not None
                if on:
                    place.container.insert(place.module, block.train(place.module.training))
                else:
                    place.container.remove(block)
            for tensor, value in values if self._is_original is on else ():
                tensor.copy_(value)
            self._is_original = not on

    def _check_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise EsperError if the old weights are not the same as at birth, or cannot be put back."""
        if self.request.train == "all" and any(hasattr(p, "full_tensor") for p in tensors.values()):
            raise EsperError("old weights cannot be put back into a sharded model; train='new' keeps them")
        changed = [name for name, before in self._sums.items() if _checksum(tensors[name]) != before]
        if changed:
            raise EsperError(
                f"{len(changed)} old parameters have changed although they were frozen, the first is"
                f" {changed[0]}, so the old model is lost; expand with train='all' to train or load them"
            )

    # --- measurements -------------------------------------------------------------------------------------

    def report(self, *, new: Iterable[Any], old: Iterable[Any], loss: Loss) -> Comparison:
        """Measure what was gained on new data and lost on old data, against the old model.

        Args:
            new: Batches of the data that the expansion was trained for, held out from its training.
            old: Batches of data that the old model was trained for.
            loss: Loss function, as in ``esper.diagnose``: ``loss(model(*inputs), target)`` for batches
                ``(inputs…, target)``, else ``loss(model, batch)``.

        Returns:
            Table with the losses without and with the expansion, and their paired differences with standard
            errors over batches; the first 100 batches of each loader are used.

        Example:
            >>> print(expanded.report(new=new_batches, old=old_batches, loss=loss))
        """
        probes = probes_of(self.model, new, old, loss)
        with self.original():
            before = [probe.losses(self.model) for probe in probes]
        trained = sum(p.numel() for p in self.parameters())
        return Comparison((Arm("expanded", None, trained, *changes(probes, before, self.model)),))

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
        all linear layers of all blocks; ``"full"``: all weights. Each trains on a copy of the old model, by
        AdamW with clipped gradients and a learning rate that rises and then falls to zero.

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
        if unknown := [name for name in rates if name not in RATES]:
            raise UnknownNameError("arm", unknown[0], RATES)
        if steps < 1:
            raise EsperError(f"steps is {steps}; it must be 1 or more")
        check_loader(train_loader, "train_loader")
        source = self.old_model()
        probes = probes_of(source, new, old, loss)
        before, arms = [probe.losses(source) for probe in probes], []
        for name in sorted(rates, key=lambda name: name != "lora"):  # It is refused before anything trains.
            for rate in rates[name]:
                model = self.old_model()
                # Every arm reads the same batches and starts from the same random state.
                with untouched_streams(train_loader):
                    parameters = trained_by(name, self, model)
                    train_arm(model, parameters, train_loader, loss, steps, rate)
                trained = sum(p.numel() for p in parameters)
                arms.append(Arm(name, rate, trained, *changes(probes, before, model)))
        return Comparison(tuple(arms))

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
            optimizer: Optimiser of the model, or a list of optimisers, in which parameters of hidden units
                and low-rank weights are replaced; not needed for blocks. With ``train="new"`` none of its
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
        if not self._blocks:
            if any(hasattr(p, "full_tensor") for p in self.model.parameters()):
                raise EsperError(
                    f"{self.request.kind} cannot join the layers of a sharded model; load its gathered state"
                    " dict into a model that was expanded in the same way, and finish that"
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
            raise EsperError(f"{what}() came after finish(): the model is a plain module without an old one")


def _checksum(parameter: Tensor) -> int:
    """Return the sum of the bits of a parameter as integers, equal on every device and for shards."""
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    values = torch.view_as_real(whole) if whole.is_complex() else whole
    return int(values.detach().view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64))
