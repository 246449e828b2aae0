"""Growth under Lightning: a callback that grows the module after every validation.

::

    growth = esper.lightning.GrowthCallback(sample=batch)
    Trainer(max_epochs=30, callbacks=[growth]).fit(module, train_loader, val_loader)
    module = growth.finish()
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from esper.growth.growth import Growth
from esper.leyline.errors import EsperError

VALIDATED_BATCHES: Final = 32
"""Of the validation set, for each configuration of the seeds."""


class GrowthCallback(Callback):
    """Slots from ``setup`` on; decisions after every validation, by the loss of ``validation_step``.

    Checkpoints hold the seeds: ``fit(…, ckpt_path=…)`` brings them back.
    """

    def __init__(
        self, *, sample: Any, net: str | None = None, batches: int = VALIDATED_BATCHES, **settings: Any
    ) -> None:
        """``sample`` is a batch as the network is called with; ``settings`` are Growth's.

        The network is the module itself, or its attribute ``net``.
        """
        self._sample = sample
        self._attribute = net
        self._batches = batches
        self._settings = {"higher_is_better": False, **settings}
        self._growth: Growth | None = None
        self._loaded: dict[str, Any] | None = None

    @property
    def growth(self) -> Growth:
        """What grows the network, from ``fit`` on."""
        if self._growth is None:
            raise EsperError("this callback has no network yet; pass it in Trainer(callbacks=[…]) and fit")
        return self._growth

    def finish(self) -> nn.Module:
        """The network as a plain module; see ``Growth.finish``."""
        return self.growth.finish()

    # --- what the Trainer calls ----------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Attach empty slots: a checkpoint that is loaded after this brings its seeds."""
        if stage == "fit" and self._growth is None:
            net = pl_module if self._attribute is None else getattr(pl_module, self._attribute)
            self._growth = Growth(net, sample=self._sample, **self._settings)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the optimisers; their states are loaded after this."""
        self.growth.bind(trainer.optimizers)
        if self._loaded is not None:
            self.growth.load_state_dict(self._loaded)
            self._loaded = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a training that would never evaluate."""
        if not trainer.enable_validation:
            raise EsperError(
                "nothing would grow: growth decides after validations, and there is none; pass"
                " val_dataloaders to fit and write a validation_step that returns the loss"
            )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the seeds on a part of the validation set and let the controller decide."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            losses = lambda: list(self._losses(trainer, pl_module))  # noqa: E731
            for event in self.growth.end_epoch(losses):
                rank_zero_info(str(event))

    def state_dict(self) -> dict[str, Any]:
        return self.growth.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    @torch.no_grad()
    def _losses(self, trainer: Trainer, pl_module: LightningModule) -> Iterator[float]:
        """The module's own validation loss, batch by batch; what it logs on the way is left out."""
        pl_module.eval()
        with _silent(pl_module):
            for number, batch in enumerate(islice(trainer.val_dataloaders or (), self._batches)):
                moved = trainer.strategy.batch_to_device(batch)
                result = pl_module.validation_step(moved, number)
                loss = result.get("loss") if isinstance(result, dict) else result
                if not isinstance(loss, Tensor | float):
                    raise EsperError(
                        f"validation_step of {type(pl_module).__name__} returned {type(result).__name__};"
                        " growth decides by its loss, so return that"
                    )
                yield float(loss)


@contextmanager
def _silent(pl_module: LightningModule) -> Iterator[None]:
    """``self.log`` does nothing inside: outside of its own loop Lightning refuses it."""
    names = ("log", "log_dict")
    for name in names:
        object.__setattr__(pl_module, name, lambda *_args, **_settings: None)
    try:
        yield
    finally:
        for name in names:
            object.__delattr__(pl_module, name)
