"""A run as plain lines, for logs and pipes.

A run: one per epoch, per stage change that matters and per episode. A training: one per iteration. Alerts: one
each, in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from esper.karn import notation
from esper.karn.episode_state import EpisodeState
from esper.karn.following import Following, IterationState
from esper.karn.palette import LOOKS
from esper.leyline.events import (
    AlertRow,
    EnvRow,
    EpisodeRow,
    EpochRow,
    Row,
    RunRow,
    TransitionRow,
    UpdateRow,
)
from esper.leyline.factored_actions import LifecycleOp
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
_SHORT_OPS: Final[Mapping[str, str]] = MappingProxyType(
    {
        LifecycleOp.GERMINATE.name: "germ",
        LifecycleOp.SET_ALPHA_TARGET.name: "alpha",
        LifecycleOp.FOSSILIZE.name: "foss",
        LifecycleOp.ADVANCE.name: "adv",
    }
)


def op_label(name: str) -> str:
    """An op in as few letters as tell it apart."""
    return _SHORT_OPS.get(name, name.lower())


def describe(row: TransitionRow, run: RunRow) -> str:
    """A stage change as a sentence: where, what, and why unless that only repeats the verb."""
    verb = VERBS[Stage(row.to_stage)]
    text = f"{run.slots[row.slot]} {run.blueprints[row.blueprint]} {verb}"
    if row.cause in ("governor", "user"):
        text += f" by the {row.cause}"
    return text if row.reason in ("", verb) else f"{text}: {row.reason}"


def alert_place(row: AlertRow, run: RunRow) -> str:
    """When it happened, in what the run counts."""
    if row.iteration is not None:
        return f"iteration {row.iteration}"
    if row.episode is None:
        return ""
    parts = [f"episode {row.episode}" if row.episode else ""]
    if run.iterations is not None:
        environment = f"environment {row.env}"
        parts = [f"iteration {row.iteration}", "" if row.scope == environment else environment]
    if row.epoch is not None:
        parts.append(f"epoch {row.epoch}")
    return ", ".join(filter(None, parts))


def alert_finding(row: AlertRow) -> str:
    """What was found, against what is allowed."""
    limit = "" if row.limit is None else f", limit {notation.significant(row.limit)}"
    return f"found {notation.significant(row.value)}{limit}"


def plain_lines(row: Row, state: Following) -> list[str]:
    """The lines that a row, which ``state`` has taken already, adds to the log."""
    if state.run is None:
        return []
    match row:
        case AlertRow():
            return [alert_line(row, state.run)]
        case UpdateRow():
            return [_iteration_line(state.iterations[-1], state)]
        case EnvRow() if state.episode is not None and not state.is_training:
            return _episode_lines(row, state.run, state.episode)
        case RunRow() if not state.is_training:
            return [_run_line(row), _legend()]
    return []


def alert_line(row: AlertRow, run: RunRow) -> str:
    """One alert, raised or cleared."""
    place = alert_place(row, run)
    where = f" in {place}" if place else ""
    line = f"{row.severity} {row.rule} {row.event}{where} ({row.scope}): {alert_finding(row)}"
    return f"{line}; {row.hint}" if row.hint and row.event == "raised" else line


def _episode_lines(row: EnvRow, run: RunRow, episode: EpisodeState) -> list[str]:
    match row:
        case EpochRow():
            return [_epoch_line(row, run, episode)]
        case TransitionRow() if Stage(row.to_stage) in VERBS:
            return [f"{_prefix(row)}after epoch {row.epoch}: {describe(row, run)}"]
        case EpisodeRow():
            return [_end_line(row)]
    return []


def _iteration_line(past: IterationState, state: Following) -> str:
    row, iterations = past.row, state.run.iterations if state.run else None
    parts = [
        f"iteration {row.iteration}/{notation.count(iterations)}",
        f"left {notation.clock(state.left)}",
        f"return {notation.gain(row.mean_return, 2)}",
        f"score {notation.points(row.val_score)}",
        f"twin {notation.points(past.twin_score)}",
        f"params {notation.count(row.params)}",
        f"kl {notation.points(row.approx_kl, 3)}",
        f"ev {notation.gain(row.explained_variance, 2)}",
        f"entropy {notation.points(row.entropy, 2)}",
        _ops(row, state.run),
    ]
    if row.evaluation_return is not None:
        judged = (
            f"return {notation.gain(row.evaluation_return, 2)}, score {notation.points(row.evaluation_score)}"
        )
        parts.append(f"| argmax {judged}")
    if row.skipped is not None:
        parts.append(f"| update left out: {row.skipped}")
    return "  ".join(parts)


def _ops(row: UpdateRow, run: RunRow | None) -> str:
    shares = zip(run.ops if run else (), row.op_shares, strict=True)
    return " ".join(f"{op_label(name)} {notation.share(part)}" for name, part in shares if part)


def _run_line(run: RunRow) -> str:
    return (
        f"run {run.name}: task {run.task}, controller {run.controller}, rng seed {run.rng_seed},"
        f" host of {notation.count(run.host_params)} parameters, slots {' '.join(run.slots)}"
    )


def _legend() -> str:
    return "stages: " + ", ".join(
        f"{look.letter} {stage.name.lower()}"
        for stage, look in LOOKS.items()
        if stage not in (Stage.UNKNOWN, Stage.PRUNED)
    )


def _epoch_line(row: EpochRow, run: RunRow, episode: EpisodeState) -> str:
    host_params = row.params - row.grown_params
    parts = [
        f"{_prefix(row)}epoch {row.epoch:>{len(str(run.horizon))}}/{run.horizon}",
        f"loss {notation.points(row.train_loss, 3):>6}",
        f"score {notation.points(row.val_score):>5}",
        f"twin {notation.points(row.twin_score):>5}",
        f"params {notation.count(row.params)} {notation.factor(row.params, host_params)}",
        "slots " + "".join(LOOKS[slot.stage].letter for slot in episode.slots),
    ]
    return "  ".join(parts)


def _end_line(row: EpisodeRow) -> str:
    return (
        f"episode {row.episode} ended ({row.ended_by}) after {notation.clock(row.seconds)}:"
        f" validation {notation.points(row.val_score)}, test {notation.points(row.test_score)},"
        f" twin {notation.points(row.twin_val_score)},"
        f" params {notation.count(row.params)} {notation.factor(row.params, row.host_params)}"
    )


def _prefix(row: EnvRow) -> str:
    """Which episode, where there is more than one."""
    return f"episode {row.episode}  " if row.episode else ""
