"""Log lines on the progress of a run, for log files and pipes.

A run without policy training logs a line per epoch, per logged stage change, per episode and per alert. A
policy training logs a line per iteration and per alert.
"""

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from esper.karn import notation
from esper.karn.metric import SCORE, Metric, metric_of
from esper.karn.palette import LOOKS, op_look
from esper.karn.questions.episode_selection import EpisodeKey
from esper.karn.questions.learning_curves import growth
from esper.karn.run import Run
from esper.leyline import AlertRow, EnvRow, EpisodeRow, EpochRow, Row, RunRow, Stage, TransitionRow, UpdateRow

LOGGED_STAGES: Final = (Stage.GERMINATED, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED, Stage.PRUNED)
"""Lifecycle stages whose start is logged."""
Stamp = tuple[type[Row], float]
"""Stamp: type and time of a telemetry row, which together identify the row. A resumed training writes the
rows of repeated iterations with new times.
"""


# --- entries ----------------------------------------------------------------------------------------


class LogEntry(NamedTuple):
    """Telemetry row for which a log line is written, and values from other tables for the same log line."""

    row: Row
    stages: tuple[Stage, ...] = ()
    """Stages of all slots at the end of an epoch; empty for rows that are not about an epoch."""
    twin_score: float | None = None
    """Mean score of the twins (hosts without growth) of an iteration, over the episodes that reached the
    horizon; None if unknown.
    """


def stamp_of(row: Row) -> Stamp:
    """Return the stamp (type and time) of a telemetry row."""
    return type(row), row.t


def logged_rows(run: Run) -> list[Row]:
    """Return all telemetry rows that are logged."""
    kinds: tuple[type[Row], ...] = (TransitionRow, EpochRow, EpisodeRow, AlertRow)
    if run.is_training:
        kinds = (UpdateRow, AlertRow)
    return [row for kind in kinds for row in run.rows(kind)]


def log(run: Run, seen: Collection[Stamp] = ()) -> list[LogEntry]:
    """Return the log entries of all telemetry rows whose stamps (row type and time) are not in ``seen``, in
    order of time.
    """
    fresh = (row for row in logged_rows(run) if stamp_of(row) not in seen)
    rows = sorted(fresh, key=lambda row: row.t)
    epochs = [row for row in rows if isinstance(row, EpochRow)]
    moves = run.rows(TransitionRow, "episode >= ?", [min(row.episode for row in epochs)]) if epochs else []
    grown = growth(run, joined=False) if run.is_training and rows else None
    twins = zip(grown.bins, grown["twin"], strict=True) if grown else ()
    twin_at = {bin_.last: twin for bin_, twin in twins}
    return [_entry(run, row, moves, twin_at) for row in rows]


def _entry(run: Run, row: Row, moves: Sequence[TransitionRow], twins: dict[int, float | None]) -> LogEntry:
    if isinstance(row, UpdateRow):
        return LogEntry(row, twin_score=twins.get(row.iteration))
    if not isinstance(row, EpochRow):
        return LogEntry(row)
    own = [move for move in moves if EpisodeKey.of(move) == EpisodeKey.of(row) and move.t <= row.t]
    reached = {move.slot: Stage(move.to_stage) for move in own}
    return LogEntry(row, stages=tuple(reached.get(i, Stage.DORMANT) for i in range(len(run.row.slots))))


# --- lines ------------------------------------------------------------------------------------------


def first_lines(run: RunRow) -> list[str]:
    """Return the first log lines of a run: its settings, and the letter that stands for each stage; empty for
    a policy training.
    """
    if run.iterations is not None:
        return []
    letters = ", ".join(
        f"{look.letter} {stage.name.lower()}"
        for stage, look in LOOKS.items()
        if stage not in (Stage.UNKNOWN, Stage.PRUNED)
    )
    return [
        f"run {run.name}: task {run.task}, controller {run.controller},"
        f" rng seed {notation.written(run.rng_seed)}, host of {notation.count(run.host_params)} parameters,"
        f" slots {' '.join(run.slots)}",
        f"stages: {letters}",
    ]


def line_of(entry: LogEntry, run: RunRow, seconds_left: float | None = None) -> str | None:
    """Return the log line of an entry; None for a stage change that is not logged. Log lines of iterations
    show ``seconds_left``, the estimated time to the end of the run.
    """
    match entry.row:
        case AlertRow() as row:
            return _alert_line(row, run)
        case UpdateRow() as row:
            return _iteration_line(row, entry.twin_score, run, seconds_left)
        case EpochRow() as row:
            return _epoch_line(row, entry.stages, run)
        case TransitionRow() as row if row.to_stage in LOGGED_STAGES:
            return f"{_prefix(row)}after epoch {row.epoch}: {describe(row, run)}"
        case EpisodeRow() as row:
            return _end_line(row, metric_of(run))
    return None


def describe(row: TransitionRow, run: RunRow) -> str:
    """Describe a stage change: slot, blueprint, stage, cause, and the reason unless it equals the name of the
    stage.
    """
    verb = Stage(row.to_stage).name.lower()
    text = f"{run.slots[row.slot]} {run.blueprints[row.blueprint]} {verb}"
    if row.cause in ("governor", "user"):
        text += f" by the {row.cause}"
    return text if row.reason in ("", verb) else f"{text}: {row.reason}"


def finding(value: float | None, limit: float | None) -> str:
    """Format the value of an alert with its limit."""
    allowed = "" if limit is None else f", limit {notation.significant(limit)}"
    return f"found {notation.significant(value)}{allowed}"


def _alert_line(row: AlertRow, run: RunRow) -> str:
    is_one_of_many = row.env is not None and run.iterations is not None
    places = [
        f"iteration {row.iteration}" if row.iteration is not None else "",
        f"episode {row.episode}" if row.episode and run.iterations is None else "",
        f"environment {row.env}" if is_one_of_many and row.scope != f"environment {row.env}" else "",
        f"epoch {row.epoch}" if row.epoch is not None else "",
    ]
    place = ", ".join(filter(None, places))
    where = f" in {place}" if place else ""
    hint = f"; {row.hint}" if row.hint and row.event == "raised" else ""
    found = finding(row.value, row.limit)
    return f"{row.severity} {row.rule} {row.event}{where} ({row.scope}): {found}{hint}"


def _iteration_line(row: UpdateRow, twin_score: float | None, run: RunRow, seconds_left: float | None) -> str:
    shares = zip(run.ops, row.op_shares, strict=True)
    parts = [
        f"iteration {row.iteration}/{notation.count(run.iterations)}",
        f"left {notation.clock(seconds_left)}",
        f"return {notation.gain(row.mean_return, 2)}",
        f"score {notation.points(row.val_score)}",
        f"twin {notation.points(twin_score)}",
        f"params {notation.count(row.params)}",
        f"kl {notation.points(row.approx_kl, 3)}",
        f"ev {notation.gain(row.explained_variance, 2)}",
        f"entropy {notation.points(row.entropy, 2)}",
        " ".join(f"{op_look(name).label} {notation.share(part)}" for name, part in shares if part),
    ]
    if row.evaluation_return is not None:
        score = notation.points(row.evaluation_score)
        parts.append(f"| argmax return {notation.gain(row.evaluation_return, 2)}, score {score}")
    if row.skipped is not None:
        parts.append(f"| update left out: {row.skipped}")
    return "  ".join(parts)


def _epoch_line(row: EpochRow, stages: tuple[Stage, ...], run: RunRow) -> str:
    metric = metric_of(run)
    name = "score" if metric is SCORE else "validation"
    of = "" if run.horizon is None else f"/{run.horizon}"
    parts = [
        f"{_prefix(row)}epoch {row.epoch:>{max(len(of) - 1, 0)}}{of}",
        f"loss {notation.points(row.train_loss, 3):>6}",
        f"{name} {metric.text(getattr(row, metric.column)):>5}",
        f"twin {metric.text(row.twin_score):>5}",
        f"params {notation.count(row.params)} {notation.factor(row.params, row.params - row.grown_params)}",
        "slots " + "".join(LOOKS[stage].letter for stage in stages),
    ]
    if row.skipped_steps:
        parts.append(f"| float16 steps left out: {row.skipped_steps}")
    return "  ".join(parts)


def _end_line(row: EpisodeRow, metric: Metric) -> str:
    return (
        f"episode {row.episode} ended ({row.ended_by}) after {notation.clock(row.seconds)}:"
        f" validation {metric.text(getattr(row, metric.column))}, test {notation.points(row.test_score)},"
        f" twin {metric.text(row.twin_val_score)},"
        f" params {notation.count(row.params)} {notation.factor(row.params, row.host_params)}"
    )


def _prefix(row: EnvRow) -> str:
    """Return the episode number as the start of a log line; empty for the first episode."""
    return f"episode {row.episode}  " if row.episode else ""
