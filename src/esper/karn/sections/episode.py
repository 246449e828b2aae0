"""Sections about one host episode: does growth pay, what is decided, what happened.

Score, twin and loss share the axis of the lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.cells import cell_len
from rich.text import Text

from esper.karn import notation
from esper.karn.episode_state import EpisodeState
from esper.karn.lines import describe, op_label
from esper.karn.palette import LOOKS
from esper.karn.sections.bands import OUTSIDE
from esper.karn.sections.chart import Bar, charted
from esper.karn.sections.lanes import Axis, lanes_of, last_of
from esper.karn.sections.layout import COURSE_AT, VALUE, Section, flow, labelled
from esper.leyline.events import RunRow
from esper.leyline.stages import Stage

EVENTS: Final = 12
_MARKS: Final = frozenset({Stage.GERMINATED, Stage.FOSSILIZED, Stage.PRUNED})
"""The stages whose beginning is an event."""


def scores(run: RunRow, episode: EpisodeState | None, width: int) -> Section:
    """Does growth pay: score and twin over the epochs, parameters and loss."""
    if episode is None:
        return Section.of([])
    axis, _ = lanes_of(run, width)
    return Section.of(
        [*_score_lines(episode, axis), *_result_line(episode), *_size_lines(episode, run, axis)], least=3
    )


def _lane_line(label: str, value: str, course: Text | str, facts: str, axis: Axis) -> Text:
    """Label, number, course over the epochs, what is to be said of it."""
    line = labelled(label, f"{value:>{VALUE}}  ", course)
    line.pad_right(max(COURSE_AT + len(axis.columns) - cell_len(line.plain), 0))
    return line.append(f"  {facts}")


def _score_lines(episode: EpisodeState, axis: Axis) -> list[Text]:
    span = notation.shared_scale([*episode.scores.values(), *episode.twin_scores.values()])
    score_course, twin_course = (
        notation.sparkline([last_of(values, epochs) for epochs in axis.columns], *span)
        for values in (episode.scores, episode.twin_scores)
    )
    score = episode.latest.val_score if episode.latest else None
    twin = episode.latest.twin_score if episode.latest else None
    best = f"best {notation.points(episode.best_score)}"
    lead = f"lead {notation.gain(notation.difference(score, twin))}"
    return [
        _lane_line("score", notation.points(score), score_course, best, axis),
        _lane_line("twin", notation.points(twin), Text(twin_course, style="dim"), lead, axis),
    ]


def _result_line(episode: EpisodeState) -> list[Text]:
    if episode.result is None:
        return []
    validation = notation.points(episode.result.val_score)
    facts = f"of the committed network; validation {validation}"
    return [labelled("test", f"{notation.points(episode.result.test_score):>{VALUE}}  {facts}")]


def _size_lines(episode: EpisodeState, run: RunRow, axis: Axis) -> list[Text]:
    latest = episode.latest
    params = episode.result.params if episode.result else latest.params if latest else None
    val_loss, train_loss = (latest.val_loss, latest.train_loss) if latest else (None, None)
    host = f"{notation.factor(params, run.host_params)} the host's {notation.count(run.host_params)}"
    losses = [last_of(episode.losses, epochs) for epochs in axis.columns]
    train = f"{notation.points(train_loss, 3)} on training data"
    return [
        labelled("params", f"{notation.count(params):>{VALUE}}  {host}"),
        _lane_line("loss", notation.points(val_loss, 3), notation.trend(losses, len(losses)), train, axis),
    ]


def course(run: RunRow, episode: EpisodeState | None, width: int) -> Section:
    """The score of an episode over its epochs, with the twin as a ghost line across."""
    if episode is None or not episode.scores:
        return Section.of([])
    axis, _ = lanes_of(run, width)
    bars = [Bar(last_of(episode.scores, e), ghost=last_of(episode.twin_scores, e)) for e in axis.columns]
    return charted(bars, f"score and twin over epochs 1–{run.horizon}")


def op_shares(run: RunRow, shares: Sequence[float | None], failed: float | None, width: int) -> list[Text]:
    """The ops in percent of all decisions, and how many of these did not come about."""
    pairs = [*zip(map(op_label, run.ops), shares, strict=True), ("failed", failed)]
    cells = []
    for name, share in pairs:
        number = notation.UNKNOWN if share is None else f"{100 * share:.0f}"
        cells.append(Text(f"{name} {number:>3}", style=OUTSIDE if name == "failed" and share else ""))
    return flow("ops %", cells, width)


def ops(run: RunRow, episode: EpisodeState | None, width: int) -> Section:
    """What was chosen, and how much of it did not come about."""
    if episode is None or not episode.decisions:
        return Section.of([])
    counts, total = episode.ops, len(episode.decisions)
    shares = [counts[op] / total for op in range(len(run.ops))]
    return Section.of(op_shares(run, shares, episode.refused / total, width), least=1)


def policy_outputs(run: RunRow, episode: EpisodeState | None, width: int) -> Section:
    """What the policy policy_output of its last decision; nothing where no policy decides."""
    row = episode.decisions[max(episode.decisions)] if episode and episode.decisions else None
    if row is None or row.value is None:
        return Section.of([])
    cells = [Text(f"expects {notation.gain(row.value, 2)}")]
    chances = zip(run.ops, row.op_probs or (), strict=False)
    cells += [Text(f"{op_label(name)} {notation.share(chance)}") for name, chance in chances]
    return Section.of(flow("policy", cells, width), least=1)


def phases(episode: EpisodeState | None, width: int) -> Section:
    """Where the time of the last epoch went, and how strongly the host was pulled."""
    row = episode.latest if episode else None
    if row is None:
        return Section.of([])
    cells = [Text(f"{name} {notation.duration(ms)}") for name, ms in row.phase_ms.items()]
    cells.append(Text(f"gradient {notation.tabular(row.host_gradient_norm)}"))
    return Section.extra(flow("time", cells, width))


def events(run: RunRow, episode: EpisodeState | None) -> Section:
    """Seeds that came, stayed and went, the latest last."""
    rows = [row for row in episode.transitions if Stage(row.to_stage) in _MARKS] if episode else []

    def draw(room: int) -> list[Text]:
        lines = []
        for index, row in enumerate(rows[-room:]):
            look = LOOKS[Stage(row.to_stage)]
            when = f"{row.epoch:>{len(str(run.horizon))}}  "
            text = Text.assemble(when, (f"{look.glyph} ", look.colour), describe(row, run))
            lines.append(labelled("" if index else "events", text))
        return lines

    return Section(draw, most=min(len(rows), EVENTS))
