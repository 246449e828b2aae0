"""Lightning callback that grows the network of a LightningModule after every validation.

::

    growth = esper.lightning.GrowthCallback(sample=batch)
    Trainer(max_epochs=30, callbacks=[growth]).fit(module, train_loader, val_loader)
    module = growth.finish()
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from esper.growth.argument_checks import check_settings
from esper.growth.growth import Growth
from esper.kasmina.edit_list import decoded, encoded
from esper.kasmina.edit_notes import note_edits
from esper.kasmina.network_file import build_or_refuse
from esper.kasmina.older_states import edits_of
from esper.kasmina.state_checks import NOTE
from esper.leyline.errors import EsperError

L = TypeVar("L", bound=LightningModule)
VALIDATED_BATCHES: Final = 32
"""Default number of validation batches on which each seed is measured."""


class GrowthCallback(Callback):
    """Callback that attaches slots in ``setup`` and lets a controller decide after every validation.

    Seeds are evaluated by ``monitor``, or else by the loss that ``validation_step`` returns. Lightning
    checkpoints include the seeds, so ``fit(…, ckpt_path=…)`` restores the seeds.

    Args:
        sample: Input for one call of the network, such as the inputs of one batch; the call serves to find
            the slots.
        net: Name of the attribute of the LightningModule that holds the network; by default the
            LightningModule itself is the network.
        batches: Number of validation batches per measurement. After every validation the network is measured
            once with all seeds, and once per seed with that seed switched off.
        monitor: Name of a value that ``validation_step`` logs for every batch, such as ``"val_acc"``.
        mode: Direction of ``monitor``: ``"min"`` for a loss, ``"max"`` if larger values are better.
        settings: Further arguments of ``esper.Growth``, such as ``slots`` and ``controller``.

    Raises:
        EsperError: ``monitor`` was given without ``mode``.

    Example:
        >>> growth = esper.lightning.GrowthCallback(sample=batch, monitor="val_acc", mode="max")
        >>> Trainer(max_epochs=30, callbacks=[growth]).fit(module, train_loader, val_loader)
        >>> module = growth.finish()
    """

    def __init__(
        self,
        *,
        sample: Any,
        net: str | None = None,
        batches: int = VALIDATED_BATCHES,
        monitor: str | None = None,
        mode: str | None = None,
        **settings: Any,
    ) -> None:
        mode = "min" if monitor is None and mode is None else mode
        check_settings(mode)
        self._sample = sample
        self._attribute = net
        self._batches = batches
        self._monitor = monitor
        self._settings = {"mode": mode, **settings}
        self._growth: Growth | None = None
        self._loaded: dict[str, Any] | None = None

    @property
    def growth(self) -> Growth:
        """``Growth`` of the network; exists after the start of ``fit``."""
        if self._growth is None:
            raise EsperError("this callback has no network yet; pass it in Trainer(callbacks=[…]) and fit")
        return self._growth

    def finish(self) -> nn.Module:
        """Return the network as a plain module without slots; see ``Growth.finish``."""
        return self.growth.finish()

    # --- hooks of the Trainer -------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Attach empty slots to the network before Lightning loads a checkpoint, which may have seeds."""
        if stage == "fit" and self._growth is None:
            net = pl_module if self._attribute is None else getattr(pl_module, self._attribute)
            self._growth = Growth(net, sample=self._sample, **self._settings)
            note_edits(self._growth.net)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Bind the optimisers to ``Growth`` and restore its saved state; Lightning loads the optimiser states
        afterwards."""
        self.growth.bind(trainer.optimizers)
        if self._loaded is not None:
            self.growth.load_state_dict(self._loaded)
            self._loaded = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise ``EsperError`` if the training runs no validation."""
        if not trainer.enable_validation:
            raise EsperError(
                "nothing would grow: growth decides after validations, and there is none; pass"
                " val_dataloaders to fit and write a validation_step that returns the loss"
            )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the seeds on the first validation batches and let the controller decide."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            values = lambda: list(self._values(trainer, pl_module))  # noqa: E731
            for event in self.growth.end_epoch(values):
                rank_zero_info(str(event))

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise ``EsperError`` before the first training step if ``monitor`` is not logged in validation."""
        logged = [name.partition("/dataloader_idx_")[0] for name in trainer.callback_metrics]
        if self._monitor is not None and self._monitor not in logged:
            raise EsperError(_nothing_logged(pl_module, self._monitor, logged))

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the edits of a finished network to its weights, for ``load_from_checkpoint``."""
        lists = edits_of(self.growth.net)
        if any(lists):
            prefix = "" if self._attribute is None else f"{self._attribute}."
            checkpoint["state_dict"].setdefault(prefix + NOTE, encoded(lists))

    def state_dict(self) -> dict[str, Any]:
        return self.growth.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    @torch.no_grad()
    def _values(self, trainer: Trainer, pl_module: LightningModule) -> Iterator[float]:
        """Yield the monitored value of each validation batch."""
        pl_module.eval()
        with _logged_values(pl_module) as logged:
            for number, batch in enumerate(islice(trainer.val_dataloaders or (), self._batches)):
                logged.clear()
                moved = trainer.strategy.batch_to_device(batch)
                yield self._value(pl_module, pl_module.validation_step(moved, number), logged)

    def _value(self, pl_module: LightningModule, result: Any, logged: Mapping[str, Any]) -> float:
        """Return the monitored value of one batch from the result and the logged values of
        ``validation_step``."""
        if self._monitor is None:
            value = result.get("loss") if isinstance(result, dict) else result
            problem = (
                f"{_step(pl_module)} returned {type(result).__name__}; growth decides by its loss, so return"
                " that, or name a logged value with monitor="
            )
        else:
            value = logged.get(self._monitor)
            problem = _nothing_logged(pl_module, self._monitor, logged)
        if not isinstance(value, Tensor | float | int):
            raise EsperError(problem)
        return float(value)


def load_from_checkpoint(module_class: type[L], checkpoint_path: Any, **settings: Any) -> L:
    """Return a LightningModule with the weights and seeds of a checkpoint, as a plain module.

    ``module_class.load_from_checkpoint`` refuses the checkpoint of a network with seeds, because it builds
    the network without seeds.

    Args:
        module_class: Class of the LightningModule.
        checkpoint_path: Checkpoint that Lightning wrote in a training with ``GrowthCallback``.
        settings: Further arguments of ``module_class.load_from_checkpoint``.

    Raises:
        HostError: The seeds do not fit the network that ``module_class`` builds.

    Example:
        >>> module = esper.lightning.load_from_checkpoint(Classifier, "best.ckpt")
    """

    def on_load_checkpoint(self: LightningModule, checkpoint: dict[str, Any]) -> None:
        module_class.on_load_checkpoint(self, checkpoint)
        for name, note in checkpoint["state_dict"].items():
            if name.endswith(NOTE):
                net = self.get_submodule(name.removesuffix(NOTE).removesuffix("."))
                build_or_refuse(checkpoint_path, net, decoded(note))

    namespace = {"on_load_checkpoint": on_load_checkpoint, "__module__": module_class.__module__}
    grown: type[L] = type(module_class.__name__, (module_class,), namespace)
    module: L = grown.load_from_checkpoint(checkpoint_path, **settings)
    module.__class__ = module_class
    return module


def _nothing_logged(pl_module: LightningModule, monitor: str, logged: Iterable[str]) -> str:
    return (
        f"{_step(pl_module)} logged no number as '{monitor}'; monitor= allows what it logs:"
        f" {', '.join(logged) or 'nothing'}"
    )


def _step(pl_module: LightningModule) -> str:
    return f"validation_step of {type(pl_module).__name__}"


@contextmanager
def _logged_values(pl_module: LightningModule) -> Iterator[dict[str, Any]]:
    """Collect what ``self.log`` and ``self.log_dict`` are called with; Lightning refuses these calls outside
    of its own loops."""
    logged: dict[str, Any] = {}
    log: Any = lambda name, value, *_args, **_settings: logged.update({name: value})  # noqa: E731
    log_dict: Any = lambda dictionary, *_args, **_settings: logged.update(dictionary)  # noqa: E731
    pl_module.log, pl_module.log_dict = log, log_dict  # type: ignore[method-assign]
    try:
        yield logged
    finally:
        del pl_module.log, pl_module.log_dict
