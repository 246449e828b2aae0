"""Narrative of one episode: a sentence per seed, per other decision and per alert, and one for the end of the
episode.

The note (sentence) about a seed describes it from germination to its end, and is listed at the epoch of
germination. Report, web page and terminal show the same notes of an episode.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from esper.karn import notation
from esper.karn.metric import Metric, metric_of
from esper.karn.palette import op_look
from esper.karn.questions.episode_selection import THIS_EPISODE, EpisodeKey
from esper.karn.run import Run
from esper.karn.seed_histories import SeedHistory, seed_histories
from esper.karn.stored_rows import R
from esper.leyline import AlertRow, DecisionRow, EpisodeRow, Head, LifecycleOp, Row, RunRow, Stage
from esper.leyline import rows as events

_ROW_TYPES: Final = (events.EpochRow, DecisionRow, events.TransitionRow, events.SeedRow, AlertRow, EpisodeRow)
"""Row types from which the narrative of an episode is made."""
_FATES: Final[Mapping[str, LifecycleOp]] = {"fossilized": LifecycleOp.FOSSILIZE, "pruned": LifecycleOp.PRUNE}
"""Op by which a controller fossilizes or prunes a seed; the keys are the fates "fossilized" and "pruned"."""


class Note(NamedTuple):
    """Note: one sentence in the narrative of an episode."""

    epoch: int
    text: str
    stage: Stage | None
    """Final stage of the seed that a note (sentence) describes; None if the note is not about one seed."""

    def __str__(self) -> str:
        return f"epoch {self.epoch}: {self.text}"


def narrative_of(run: Run, episode: EpisodeKey) -> list[Note]:
    """Return the notes (sentences) about one episode of a run."""
    return narrate(run.row, [row for kind in _ROW_TYPES for row in run.rows(kind, THIS_EPISODE, episode)])


def narrate(run: RunRow, rows: Iterable[Row]) -> list[Note]:
    """Return the notes (sentences) about one episode in order of epochs.

    Args:
        run: Run row, which lists the names of slots, blueprints, ops and heads.
        rows: Rows of one episode, from any telemetry tables.
    """
    kept = list(rows)
    last = max(
        _of(kept, events.EnvRow), key=lambda row: (row.epoch, isinstance(row, EpisodeRow)), default=None
    )
    if last is None:
        return []
    decisions = _of(kept, DecisionRow)
    seeds = seed_histories(run, last.epoch, _of(kept, events.SeedRow), _of(kept, events.TransitionRow))
    covered = {id(row) for seed in seeds for row in _decisions_of(seed, decisions, run)}
    notes = [_seed_note(seed, decisions, run) for seed in seeds]
    notes += [
        _decision_note(row, seeds, run)
        for row in decisions
        if row.action[Head.OP] != LifecycleOp.WAIT and id(row) not in covered
    ]
    raised = [row for row in _of(kept, AlertRow) if row.event == "raised"]
    notes += [Note(row.epoch or 0, _alert_text(row), None) for row in raised]
    notes += [_end_note(row, metric_of(run)) for row in _of(kept, EpisodeRow)]
    return sorted(notes, key=lambda note: note.epoch)


def _of(rows: Sequence[Row], kind: type[R]) -> list[R]:
    return [row for row in rows if isinstance(row, kind)]


def _decisions_of(seed: SeedHistory, decisions: Sequence[DecisionRow], run: RunRow) -> list[DecisionRow]:
    """Return the decisions that the note about a seed describes: its germination, and its fossilization or
    prune if the controller decided it.
    """
    covered = [(seed.germinated_at, LifecycleOp.GERMINATE)]
    if seed.fate in _FATES and seed.cause == "policy":
        covered.append((seed.fate_epoch, _FATES[seed.fate]))
    return [
        row
        for row in decisions
        if row.succeeded
        and (row.epoch, row.action[Head.OP]) in covered
        and run.slots[row.action[Head.SLOT]] == seed.slot
    ]


def _seed_note(seed: SeedHistory, decisions: Sequence[DecisionRow], run: RunRow) -> Note:
    outputs = {row.action[Head.OP]: policy_output(row, run) for row in _decisions_of(seed, decisions, run)}
    metric = metric_of(run)
    contribution = metric.gain_with_error(seed.contribution, seed.contribution_error)
    unit = "" if seed.contribution is None else metric.unit
    stage, fate = seed.fate_stage, seed.fate
    if stage is None:
        stage = seed.stages[-1][0] if seed.stages else Stage.GERMINATED
        fate = f"still {stage.name.lower()} after {seed.fate_epoch}"
    elif seed.fate in _FATES:
        by = f" by the {seed.cause}" if seed.cause in ("governor", "user") else ""
        why = f": {seed.reason}" if seed.reason else ""
        fate += f"{by} at {seed.fate_epoch}{outputs.get(_FATES[seed.fate], '')}{why}"
    text = (
        f"{seed.blueprint} germinated in {seed.slot}{outputs.get(LifecycleOp.GERMINATE, '')};"
        f" contribution {contribution}{unit}; {fate}"
    )
    return Note(seed.germinated_at, text, stage)


def _decision_note(row: DecisionRow, seeds: Sequence[SeedHistory], run: RunRow) -> Note:
    op = row.action[Head.OP]
    slot = run.slots[row.action[Head.SLOT]]
    choices = ", ".join(
        f"{run.heads[head].removeprefix('alpha_')} {run.head_choices[head][row.action[head]]}"
        for head in range(Head.SLOT + 1, len(run.heads))
        if row.read[head]
    )
    if not row.succeeded:
        details = f" ({choices})" if choices else ""
        by = f" by {row.refused_by}" if row.refused_by else ""
        why = f": {', '.join(row.failed_checks)}" if row.failed_checks else ""
        text = f"{run.ops[op]} in {slot}{details} was refused{by}{why}"
    else:
        holder = next((s for s in reversed(seeds) if s.slot == slot and s.germinated_at <= row.epoch), None)
        who = f"{holder.blueprint} in {slot}" if holder else slot
        text = f"{who} {op_look(run.ops[op]).deed}" + (f": {choices}" if choices else "")
    return Note(row.epoch, text + policy_output(row, run), None)


def policy_output(row: DecisionRow, run: RunRow) -> str:
    """Return the probabilities of the chosen op and of the best alternative as text; empty if no policy made
    the decision.
    """
    if row.op_probs is None:
        return ""
    op = row.action[Head.OP]
    chosen = row.op_probs[op]
    text = f"policy {notation.points(chosen, 2)}"
    others = {other: p for other, p in enumerate(row.op_probs) if other != op and p}
    if others:
        best = max(others, key=lambda other: others[other])
        name, probability = run.ops[best], notation.points(others[best], 2)
        outdone = chosen is not None and others[best] > chosen
        text += f"; {name} was likelier, {probability}" if outdone else f", next best {name} {probability}"
    return f" ({text})"


def _alert_text(row: AlertRow) -> str:
    """Return the rule, value, limit and hint of an alert as text."""
    if row.value is None and row.limit is None:
        return f"{row.rule}; {row.hint}"
    value, limit = notation.significant(row.value), notation.significant(row.limit)
    return f"{row.rule} ({value}, limit {limit}); {row.hint}"


def _end_note(row: EpisodeRow, metric: Metric) -> Note:
    score = getattr(row, metric.column)
    lead = metric.lead(score, row.twin_val_score)
    against = "" if lead is None else f" ({metric.gain(lead)} against the twin)"
    test = "" if row.test_score is None else f" {notation.points(row.test_score)} on test,"
    return Note(
        row.epoch,
        f"the {row.ended_by} ended the episode: {metric.text(score)} on validation{against},{test}"
        f" {notation.count(row.params)} parameters",
        None,
    )
