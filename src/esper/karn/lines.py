"""A run as plain lines, for logs and pipes: one per epoch, stage change that matters, and alert."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from esper.karn import notation
from esper.karn.following import Following, LifeState
from esper.karn.palette import LOOKS
from esper.leyline.events import AlertRow, EpisodeRow, EpochRow, LifeRow, Row, RunRow, TransitionRow
from esper.leyline.stages import Stage

VERBS: Final[Mapping[Stage, str]] = MappingProxyType(
    {
        Stage.GERMINATED: "germinated",
        Stage.BLENDING: "blending",
        Stage.HOLDING: "holding",
        Stage.FOSSILIZED: "fossilized",
        Stage.PRUNED: "pruned",
    }
)
"""The stage changes worth a line, in words."""


def describe(row: TransitionRow, state: Following) -> str:
    """A stage change as a sentence: where, what, and why unless that only repeats the verb."""
    verb = VERBS[Stage(row.to_stage)]
    text = f"{state.slot_name(row.slot)} {state.blueprint_name(row.blueprint)} {verb}"
    if row.cause in ("governor", "user"):
        text += f" by the {row.cause}"
    return text if row.reason in ("", verb) else f"{text}: {row.reason}"


def plain_lines(row: Row, state: Following) -> list[str]:
    """The lines that a row, which ``state`` has taken already, adds to the log."""
    match row:
        case RunRow():
            return [_run_line(row), _legend()]
        case EpochRow() if state.life is not None:
            return [_epoch_line(row, state, state.life)]
        case TransitionRow() if Stage(row.to_stage) in VERBS:
            return [f"{_prefix(row)}after epoch {row.epoch}: {describe(row, state)}"]
        case AlertRow():
            return [f"{_prefix(row)}after epoch {notation.count(row.epoch)}: {warn(row)}"]
        case EpisodeRow():
            return [_life_line(row)]
    return []


def warn(row: AlertRow) -> str:
    """An intervention of the governor as a sentence: what was wrong, and what was done."""
    found = "a loss that is not finite" if row.value is None else f"a loss of {row.value:.3g}"
    allowed = "" if row.limit is None else f", at most {row.limit:.3g} is healthy"
    return f"{row.hint} because of {row.rule} ({found}{allowed})"


def _run_line(run: RunRow) -> str:
    return (
        f"run {run.name}: task {run.task}, decider {run.decider}, rng seed {run.rng_seed},"
        f" host of {notation.count(run.host_params)} parameters, slots {' '.join(run.slots)}"
    )


def _legend() -> str:
    return "stages: " + ", ".join(
        f"{look.letter} {stage.name.lower()}"
        for stage, look in LOOKS.items()
        if stage not in (Stage.UNKNOWN, Stage.PRUNED)
    )


def _epoch_line(row: EpochRow, state: Following, life: LifeState) -> str:
    host_params = row.params - row.grown_params
    parts = [
        f"{_prefix(row)}epoch {row.epoch:>{len(str(state.max_epochs))}}/{state.max_epochs}",
        f"loss {notation.points(row.train_loss, 3):>6}",
        f"score {notation.points(row.val_score):>5}",
        f"twin {notation.points(row.twin_score):>5}",
        f"params {notation.count(row.params)} {notation.factor(row.params, host_params)}",
        "slots " + "".join(LOOKS[slot.stage].letter for slot in life.slots),
    ]
    return "  ".join(parts)


def _life_line(row: EpisodeRow) -> str:
    return (
        f"life {row.episode} ended ({row.ended_by}) after {notation.clock(row.seconds)}:"
        f" validation {notation.points(row.val_score)}, test {notation.points(row.test_score)},"
        f" twin {notation.points(row.twin_val_score)},"
        f" params {notation.count(row.params)} {notation.factor(row.params, row.host_params)}"
    )


def _prefix(row: LifeRow | AlertRow) -> str:
    """Which life, where there is more than one."""
    return f"life {row.episode}  " if row.episode else ""
