"""Events and warnings of a growing network, each with one sentence for the user, and the line that shows the
position in a training and the time left.

Warnings concern seeds without gradient, copies of the network without its seeds, constant metrics and
recompilation limits.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal, TextIO
from weakref import WeakKeyDictionary

import numpy as np
from torch import nn

from esper.growth import torch_wrappers
from esper.kasmina.network import MorphogeneticModel
from esper.kasmina.slot import COPIES, SeedSlot
from esper.leyline import GrowthWarning, Stage, StageMove

EventKind = Literal[
    "measured",
    "raced",
    "germinated",
    "alpha",
    "rank",
    "fossilized",
    "pruned",
    "refused",
    "rolled_back",
    "warning",
]
_REPORTED: Final[Mapping[Stage, tuple[EventKind, str]]] = {
    Stage.GERMINATED: ("germinated", "was planted"),
    Stage.FOSSILIZED: ("fossilized", "became permanent"),
    Stage.PRUNED: ("pruned", "was removed"),
}
"""Stages whose start is reported as an event, with the kind of the event and the words after the name of the
seed in the event's sentence."""


@dataclass(frozen=True, slots=True)
class GrowthEvent:
    """Event of a growing network, at the end of an epoch or after an action by hand; ``print`` shows its
    sentence."""

    epoch: int
    """Number of epochs that had been trained when the event occurred."""
    kind: EventKind
    sentence: str
    slot: str | None = None
    blueprint: str | None = None
    contribution: float | None = None
    """Contribution of the seed in units of the user's metric; positive if the seed helps."""
    error: float | None = None
    """Standard error of the contribution; None unless the metric has one value per batch."""
    shapley: float | None = None
    """Shapley value of the seed in units of the user's metric; None if not measured."""

    def __str__(self) -> str:
        return f"epoch {self.epoch}: {self.sentence}"


class Narrator:
    """Formats the events of one network as sentences."""

    def __init__(self, network: MorphogeneticModel) -> None:
        self._network = network
        self.epoch = 0

    def seed(self, slot: int, blueprint: int | None = None) -> str:
        """Return blueprint and slot of a present or removed seed, for example ``conv_light in layer2``."""
        return f"{self._name(slot, blueprint)} in {self._network.sites[slot].name}"

    def _name(self, slot: int, blueprint: int | None = None) -> str | None:
        number = int(self._network.table.blueprint[0, slot]) if blueprint is None else blueprint
        return None if number < 0 else self._network.action_space.blueprint_names[number]

    def about(
        self, kind: EventKind, slot: int, text: str, blueprint: int | None = None, **measured: float | None
    ) -> GrowthEvent:
        """Return an event about one seed; its sentence is the name of the seed followed by ``text``."""
        place, name = self._network.sites[slot].name, self._name(slot, blueprint)
        return GrowthEvent(self.epoch, kind, f"{self.seed(slot, blueprint)} {text}", place, name, **measured)

    def worth(
        self, slot: int, value: float, error: float, shapley: float, *, calibrated: bool
    ) -> GrowthEvent:
        """Return the event of a measured contribution; unknown errors and Shapley values are NaN."""
        bar = "" if math.isnan(error) else f" ± {error:.2g}"
        share = "" if math.isnan(shapley) else f", Shapley value {shapley:+.3g}"
        note = "" if calibrated else " (uncalibrated: BatchNorm statistics are those with it on)"
        return self.about(
            "measured",
            slot,
            f"is worth {value:+.3g}{bar}{share}{note}",
            contribution=value,
            error=None if math.isnan(error) else error,
            shapley=None if math.isnan(shapley) else shapley,
        )

    def moves(self, moves: Iterable[StageMove]) -> list[GrowthEvent]:
        """Return the events of the stage moves that are reported: germination, fossilisation and pruning."""
        events = []
        for move in moves:
            if move.target in _REPORTED:
                kind, text = _REPORTED[move.target]
                if kind == "germinated":
                    text += f" ({int(self._network.table.seed_params[0, move.slot]):,} parameters)"
                events.append(self.about(kind, move.slot, text, blueprint=move.blueprint))
        return events

    def warning(self, sentence: str, slot: int | None = None) -> GrowthEvent:
        """Issue a ``GrowthWarning`` and return an event with the same sentence."""
        GrowthWarning.issue(f"epoch {self.epoch}: {sentence}")
        seed = () if slot is None else (self._network.sites[slot].name, self._name(slot))
        return GrowthEvent(self.epoch, "warning", sentence, *seed)


CONSTANT_EPOCHS: Final = 5
"""Number of consecutive epochs with an equal metric after which a warning is issued."""

AT_REST: Final = 0.01
"""Fraction of the highest learning rate so far; below this rate no warning of a constant metric is issued."""


class SanityChecks:
    """Compares seeds and metric with those of earlier epochs, and issues warnings."""

    def __init__(self, network: MorphogeneticModel, narrator: Narrator) -> None:
        self._network = network
        self._narrator = narrator
        self._seen: dict[int, list[float]] = {}
        self._unchanged: set[int] = set()
        """Slots of the seeds that the user was warned of because they did not change."""
        self._values: list[float] = []
        self._copies: WeakKeyDictionary[SeedSlot, list[float]] = WeakKeyDictionary()
        """Slots without their seed in copies of the network, with the sums of squares of the weights of each
        slot's submodule.
        """
        self._highest_rate = 0.0
        self._given_up = torch_wrappers.recompile_limits_hit()

    def born(self, slot: int) -> None:
        """Store the sums of squares of a new seed's weights, to find out later whether the seed learns."""
        self._seen[slot] = _squares(self._network.slots[slot].held)
        self._unchanged.discard(slot)
        own = self._network.slots[slot]
        left = [c for c in COPIES if c.token == own.token and c.site == own.site and c.graft is None]
        self._copies.update({copy: _squares(copy.place.module) for copy in left})

    def check_training(self) -> list[GrowthEvent]:
        """Warn of seeds that do not change or are not finite, of copies that lack a seed, and of
        recompilation limits."""
        events = []
        for slot in np.flatnonzero(self._network.table.in_forward[0]).tolist():
            now, seed = _squares(self._network.slots[slot].held), self._narrator.seed(slot)
            if now == self._seen.get(slot) and slot not in self._unchanged:
                self._unchanged.add(slot)
                sentence = (
                    f"{seed} did not change: no gradient or no optimiser step reached it. If the loss depends"
                    f" on {self._network.sites[slot].name}, pass the optimiser that steps to Growth or"
                    " bind(); otherwise prune the seed. This is reported once"
                )
                events.append(self._narrator.warning(sentence, slot))
            if not all(map(math.isfinite, now)):
                sentence = f"{seed} has weights that are not finite; prune it or return to a checkpoint"
                events.append(self._narrator.warning(sentence, slot))
            self._seen[slot] = now
        # Warn of an updated copy without the seeds, such as a weight average that the user computes by hand.
        if any(_squares(copy.place.module) != before for copy, before in self._copies.items()):
            sentence = (
                "a copy of the network is updated without having grown with it; name it, Growth(net,"
                " optimizer, follow=[copy]), or copy the network again after growth"
            )
            events.append(self._narrator.warning(sentence))
        self._copies.clear()
        before, self._given_up = self._given_up, torch_wrappers.recompile_limits_hit()
        if self._given_up > before:
            sentence = (
                "torch.compile reached its recompile limit, and a part of the network runs uncompiled; raise"
                " torch._dynamo.config.recompile_limit, or look at TORCH_LOGS=recompiles"
            )
            events.append(self._narrator.warning(sentence))
        return events

    def check_score(self, score: float) -> list[GrowthEvent]:
        """Warn of a metric that is not finite, or that stays constant at a normal learning rate."""
        if not math.isfinite(score):
            sentence = "evaluate returned a value that is not finite; nothing is decided on it"
            return [self._narrator.warning(sentence)]
        groups = self._network.groups
        optimisers = [] if groups is None else groups.optimisers
        rate = max((g["lr"] for o in optimisers for g in o.param_groups), default=0.0)
        self._highest_rate = max(self._highest_rate, float(rate))
        if rate < AT_REST * self._highest_rate:
            return []  # At the end of a learning-rate schedule a constant metric is normal.
        self._values = [*self._values, score] if self._values[-1:] == [score] else [score]
        if len(self._values) == CONSTANT_EPOCHS:
            sentence = f"evaluate returned the same {CONSTANT_EPOCHS} times; does it evaluate this network?"
            return [self._narrator.warning(sentence)]
        return []

    def state(self) -> dict[str, Any]:
        return {
            "seen": dict(self._seen),
            "unchanged": sorted(self._unchanged),
            "values": list(self._values),
            "rate": self._highest_rate,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self._seen = {int(slot): list(found) for slot, found in state["seen"].items()}
        self._unchanged = set(state.get("unchanged", ()))  # Absent in states that older versions saved.
        self._values, self._highest_rate = list(state["values"]), float(state["rate"])


def _squares(module: nn.Module) -> list[float]:
    """Return the sum of squares of each parameter; a changed sum shows that the parameter was updated."""
    return [float(p.detach().double().pow(2).sum()) for p in module.parameters()]


# --- line with the time left --------------------------------------------------------------------------------


INTERVAL: Final = 0.1
"""Smallest number of seconds between two updates of the line."""


class ProgressLine:
    """Line that overwrites itself by a carriage return, which terminals and notebooks understand.

    Args:
        stream: Output of the line, such as ``sys.stderr``.
        clock: Function that returns seconds.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream: TextIO | None = stream
        self._clock = clock
        self._began: tuple[float, float] | None = None
        """Time and fraction of the training at the first update, which a resumed training begins above 0."""
        self._shown = -math.inf
        self._width = 0

    def update(self, fraction: float, text: str) -> None:
        """Show ``text`` and the time left after ``fraction`` of the training, unless the last update was a
        moment ago."""
        now = self._clock()
        if self._began is None:
            self._began = (now, fraction)
        began, first = self._began
        if now - self._shown < INTERVAL:
            return
        self._shown = now
        if fraction > first:
            left = (now - began) * max(1.0 - fraction, 0.0) / (fraction - first)
            text += f", {timedelta(seconds=round(left))} left"
        line = text[: shutil.get_terminal_size().columns - 1]
        self._write(f"\r{line:<{self._width}}")
        self._width = len(line)

    def clear(self) -> None:
        """Erase the line, so that other output can be printed."""
        if self._width:
            self._write(f"\r{'':<{self._width}}\r")
        self._width = 0

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError as error:
            self._stream = None
            GrowthWarning.issue(f"the progress cannot be shown: {error.strerror}; the training continues")
