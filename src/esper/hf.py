"""Callback of ``transformers.Trainer`` that grows the model after every evaluation; reader of grown models.

::

    growth = esper.hf.GrowthTrainerCallback(sample=batch)
    Trainer(model, args, train_dataset=…, eval_dataset=…, callbacks=[growth]).train()
    model = growth.finish()
    model.save_pretrained("grown")
    model = esper.hf.from_pretrained("grown")
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, EvalPrediction, PreTrainedModel, Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.utils import logging

from esper.growth.argument_checks import check_settings
from esper.growth.growth import Growth
from esper.growth.pretrained_files import save_edits_with
from esper.kasmina.edit_list import decoded
from esper.kasmina.edit_notes import note_edits
from esper.kasmina.network_file import EDITS_FILE, build_or_refuse, check_base, misfit, read_edits
from esper.kasmina.state_checks import NOTE
from esper.leyline.errors import EsperError

M = TypeVar("M", bound=PreTrainedModel)
EVALUATED_BATCHES: Final = 32
"""Default number of evaluation batches on which each seed is measured."""
LOSS: Final = "eval_loss"
"""Name that the Trainer gives to the evaluation loss."""
_logger = logging.get_logger(__name__)


class GrowthTrainerCallback(TrainerCallback, ExportableState):
    """Callback that attaches slots when the Trainer is created and lets a controller decide after every
    evaluation.

    Seeds are evaluated by ``monitor``: the loss that the model returns, or a metric. Trainer
    checkpoints include the seeds, so ``resume_from_checkpoint`` and ``load_best_model_at_end`` restore
    the seeds.

    Args:
        sample: Batch without labels; the model is called with it to find slots.
        batches: Number of evaluation batches per measurement. After every evaluation the model is measured
            once with all seeds, and once per seed with that seed switched off.
        monitor: ``"eval_loss"``, or the name of a metric that ``compute_metrics`` returns, such as
            ``"eval_accuracy"``.
        mode: Direction of ``monitor``: ``"min"`` for a loss, ``"max"`` if larger values are better.
        compute_metrics: Function that the Trainer has as ``compute_metrics``; it is called for every batch.
        settings: Further arguments of ``esper.Growth``, such as ``slots`` and ``controller``.

    Raises:
        EsperError: ``monitor`` names a metric, and ``mode`` or ``compute_metrics`` is missing.

    Example:
        >>> growth = esper.hf.GrowthTrainerCallback(sample=batch)
        >>> Trainer(model, args, train_dataset=…, eval_dataset=…, callbacks=[growth]).train()
        >>> model = growth.finish()
    """

    def __init__(
        self,
        *,
        sample: Any,
        batches: int = EVALUATED_BATCHES,
        monitor: str = LOSS,
        mode: str | None = None,
        compute_metrics: Callable[[EvalPrediction], Mapping[str, float]] | None = None,
        **settings: Any,
    ) -> None:
        mode = "min" if monitor == LOSS and mode is None else mode
        check_settings(mode)
        if monitor != LOSS and compute_metrics is None:
            raise EsperError(
                f"monitor is {monitor!r} without compute_metrics; pass the Trainer's compute_metrics to the"
                f" callback as well, or monitor '{LOSS}'"
            )
        self._sample = sample
        self._batches = batches
        self._monitor, self._compute_metrics = monitor, compute_metrics
        self._settings = {"mode": mode, **settings}
        self._growth: Growth | None = None
        self._training = False
        self._regroup: Callable[[], None] | None = None

    @property
    def growth(self) -> Growth:
        """``Growth`` of the model; exists after the callback was passed to a Trainer."""
        if self._growth is None:
            raise EsperError("this callback has no Trainer yet; pass it in Trainer(callbacks=[…])")
        return self._growth

    def finish(self) -> nn.Module:
        """Return the model as a plain module without slots; see ``Growth.finish``."""
        return self.growth.finish()

    # --- hooks of the Trainer -------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Attach empty slots to the model before the Trainer loads a checkpoint, which may have seeds."""
        self._growth = Growth(known["model"], sample=self._sample, **self._settings)
        note_edits(self._growth.net)

    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Bind the optimiser to ``Growth``; in a resumed training, restore the saved slots, seeds and
        counters.

        Raises:
            EsperError: The callback was added after the Trainer was created, there are no evaluations, or the
                checkpoint was written without this callback.
        """
        if self._growth is None:
            raise EsperError(
                "the callback came to the Trainer after it was made, too late for a checkpoint's seeds; pass"
                " it in Trainer(callbacks=[…])"
            )
        if str(getattr(args.eval_strategy, "value", args.eval_strategy)) == "no":
            raise EsperError(
                "nothing would grow: growth decides after evaluations, and eval_strategy is 'no'; set"
                " eval_strategy='epoch' and pass an eval_dataset"
            )
        self._growth.bind(known["optimizer"])
        self._regroup = _grouping(known["optimizer"], self._growth.net)
        if state.global_step:
            stored = state.stateful_callbacks.get(type(self).__name__)
            if stored is None:
                raise EsperError(
                    "the checkpoint was written without GrowthTrainerCallback; leave it out to resume"
                )
            self._growth.load_state_dict(stored["attributes"]["growth"])
        self._training = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Measure the seeds on the first evaluation batches and let the controller decide."""
        if self._training:
            net, loader = self.growth.net, known["eval_dataloader"]
            for event in self.growth.end_epoch(lambda: list(self._values(net, loader))):
                _logger.warning(str(event))  # By default transformers prints no log messages below WARNING.
            if self._regroup is not None:
                self._regroup()

    def on_train_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Stop growth at the end of the training: later evaluations plant and prune no seeds."""
        self._training = False

    def state(self) -> dict[str, Any]:
        """Return slots, seeds and counters, which the Trainer writes to ``trainer_state.json``."""
        growth = None if self._growth is None else self._growth.state_dict()
        return {"args": {}, "attributes": {"growth": growth}}

    @torch.no_grad()
    def _values(self, net: nn.Module, batches: Iterable[Any]) -> Iterator[float]:
        """Yield the monitored value of each evaluation batch."""
        net.eval()
        device = next(net.parameters()).device
        for batch in islice(batches, self._batches):
            output = net(**{name: value.to(device) for name, value in batch.items()})
            yield _loss(net, output, batch) if self._monitor == LOSS else self._metric(output, batch)

    def _metric(self, output: Any, batch: Mapping[str, Any]) -> float:
        """Return the monitored metric of one evaluation batch."""
        assert self._compute_metrics is not None
        logits, labels = output["logits"].float().cpu().numpy(), batch["labels"].cpu().numpy()
        evaluated = EvalPrediction(logits, labels)
        found = self._compute_metrics(evaluated)
        name = self._monitor.removeprefix("eval_")
        if name not in found:
            raise EsperError(
                f"compute_metrics returns no '{name}'; monitor= allows {LOSS}, {', '.join(found)}"
            )
        return float(found[name])


def _grouping(optimizer: Any, net: nn.Module) -> Callable[[], None] | None:
    """Return a function that sorts all parameters into the weight-decay groups of the Trainer.

    A resumed training builds a new optimiser from the grown model, and the saved optimiser state must have
    the same parameter groups as the new optimiser. Returns None if the optimiser's parameter groups are not
    the Trainer's own.
    """

    def wanted() -> list[list[nn.Parameter]]:
        names = Trainer.get_decay_parameter_names(None, net)  # type: ignore[arg-type]  # of any Trainer
        decayed = set(names)
        trained = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
        return [[p for name, p in trained if (name in decayed) is decays] for decays in (True, False)]

    def regroup() -> None:
        for group, members in zip(optimizer.param_groups, wanted(), strict=True):
            group["params"][:] = members

    found = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    return regroup if found == [[id(p) for p in members] for members in wanted()] else None


def from_pretrained(
    folder: Path | str, model_class: type[M] | None = None, **settings: Any
) -> M | PreTrainedModel:
    """Return a grown model of transformers that ``save_pretrained`` wrote, as a plain module.

    Models without ``esper.json``, whose configuration describes all growth, are read as well.

    Args:
        folder: Folder that ``save_pretrained`` of the finished model wrote.
        model_class: Class of the model; the class that the configuration names unless given.
        settings: Further arguments of ``model_class.from_pretrained``, such as ``dtype``.

    Raises:
        EsperError: ``esper.json`` is damaged or has another format, the class is unknown, or the folder is a
            checkpoint in the middle of growth.
        HostError: The seeds or weights in the folder do not fit the model.

    Example:
        >>> model = esper.hf.from_pretrained("grown")
    """
    place = Path(folder)
    kind = model_class or _class_named_in(place)
    if not (place / EDITS_FILE).exists():
        _check_finished(place)
        return kind.from_pretrained(place, **settings)
    name, lists = read_edits(place)
    level = logging.get_verbosity()
    # transformers warns of the weights of seeds, which are loaded below.
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # of transformers
    try:
        read: Any = kind.from_pretrained
        net, found = read(place, output_loading_info=True, ignore_mismatched_sizes=True, **settings)
    finally:
        logging.set_verbosity(level)
    check_base(place, net, name)
    before = {name: value.shape for name, value in net.state_dict().items()}
    build_or_refuse(place, net, lists)
    new = {n: value for n, value in net.state_dict().items() if before.get(n) != value.shape}
    stored = _stored(place, new)
    shapes = {name: value.shape for name, value in stored.items()}
    lacking = {name for name, value in new.items() if shapes.get(name) != value.shape}
    lacking |= {*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])} - new.keys()
    if lacking:
        name = min(lacking)
        raise misfit(place, net, f"its files have no {name} of shape {tuple(net.state_dict()[name].shape)}")
    net.load_state_dict(stored, strict=False)
    save_edits_with(net)
    return net


def _class_named_in(folder: Path) -> Any:
    """Return the class of transformers that the configuration in a folder names."""
    names = AutoConfig.from_pretrained(folder).architectures or ["no class"]
    found = getattr(transformers, names[0], None)
    if found is None:
        raise EsperError(
            f"the configuration in '{folder}' names {names[0]}, which transformers does not have; pass"
            " model_class="
        )
    return found


def _check_finished(folder: Path) -> None:
    """Raise EsperError if a folder is a checkpoint of a Trainer in the middle of growth."""
    for note in _stored(folder, [NOTE]).values():
        if any(edit["block"] is None or edit["alpha"] != 1.0 for edits in decoded(note) for edit in edits):
            raise EsperError(
                f"'{folder}' is a checkpoint of a model that was growing; resume it with a Trainer that has"
                " GrowthTrainerCallback, call finish() of the callback, and save_pretrained()"
            )


def _stored(folder: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the tensors of the given names in the safetensors files of a folder."""
    wanted, found = set(names), dict[str, Tensor]()
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in wanted.intersection(file.keys())}
    return found


def _loss(net: nn.Module, output: Any, batch: Mapping[str, Any]) -> float:
    """Return the loss that the model returned for one evaluation batch."""
    loss = output["loss"] if isinstance(output, dict) and "loss" in output else None
    if loss is None:
        raise EsperError(
            f"{type(net).__name__} returned no loss for an evaluation batch with {', '.join(batch)}; give"
            " the evaluation set labels"
        )
    return float(loss)
