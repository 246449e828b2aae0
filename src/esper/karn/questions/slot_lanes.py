"""Chart of the stages of every slot over the epochs of one episode, below the score of the episode.

In the chart of slots, colour shows the stage, and the filled height of a bar shows alpha (blend weight).
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final, NamedTuple

from markupsafe import Markup

from esper.karn import notation
from esper.karn.drawing import svg
from esper.karn.drawing.axes import AxisScale, x_axis
from esper.karn.drawing.chart import ChartData, Panel, draw_panel, panel_scale
from esper.karn.drawing.picture import Picture
from esper.karn.metric import Metric, metric_of
from esper.karn.palette import LOOKS
from esper.karn.questions.episode_selection import THIS_EPISODE, EpisodeKey, default_episode, episode_name
from esper.karn.questions.series import AxisBin, Series, Values
from esper.karn.run import Run
from esper.karn.seed_histories import SeedHistory, grouped, seed_histories
from esper.leyline import COOLING_STAGES, FORWARD_STAGES, EpochRow, SeedRow, Stage, TransitionRow

MARKED: Final = (Stage.GERMINATED, Stage.FOSSILIZED, Stage.PRUNED)
"""Stages whose start is marked by a symbol in the chart of slots."""
_RIGHT: Final = svg.WIDTH - 124
_SCORES: Final = (12.0, 162.0)
_FIRST_LANE: Final = 184.0
_LANE: Final = 46.0
_BAR_TOP: Final = 14.0
_BAR: Final = 25.0
_NAME_LETTERS: Final = 12
"""Largest number of characters of a slot's name in the chart."""
_MOST_GUIDES: Final = 16
"""Largest number of vertical lines from fossilizations to the score curve; more lines would hide the
curve.
"""


class Span(NamedTuple):
    """Interval in which a slot has one stage: from the end of epoch ``start`` to the end of epoch ``end``."""

    stage: Stage
    start: int
    end: int
    alphas: tuple[float | None, ...]
    """Alpha (blend weight) of the seed in each epoch; None if it was not recorded."""


class Lane(NamedTuple):
    """Lane of the chart of slots: stages and seeds of one slot."""

    slot: str
    stage: Stage
    """Stage of the slot at the end of the last known epoch."""
    alpha: float | None
    """Alpha of the seed in the epoch after the last known one; None if the slot is empty or alpha was not
    recorded.
    """
    spans: tuple[Span, ...]
    """Stages of the slot in order of time; between two stages the slot may be empty."""
    marks: tuple[TransitionRow, ...]
    """Transitions of the slot that the chart marks by a symbol: germination, fossilization and prune."""
    seeds: tuple[SeedHistory, ...]
    """Seeds of the slot in order of germination."""


class Lanes(NamedTuple):
    """Scores and slots of one episode over the same epochs, for the chart of slots."""

    name: str
    """Display name of the episode, such as "episode 0"."""
    horizon: int
    """Last epoch of the horizontal axis; the episode may have ended earlier, or be unfinished."""
    epoch: int
    """Last epoch of the episode for which rows were written."""
    scores: Series | None
    """Scores of the episode and of its twin after each epoch, as series ``score`` and ``twin``; None if no
    epoch is known.
    """
    lanes: tuple[Lane, ...]
    metric: Metric

    @property
    def last_scores(self) -> tuple[float | None, float | None]:
        """Score of the episode and of its twin after the last epoch."""
        return (self.scores.last("score"), self.scores.last("twin")) if self.scores else (None, None)


def lanes(run: Run, episode: EpisodeKey | None = None) -> Lanes | None:
    """Return scores and slot stages of an episode; None if the episode has no rows. If ``episode`` is None,
    it is the best episode of a policy training, or the last episode of any other run.
    """
    episode = default_episode(run) if episode is None else episode
    if episode is None:
        return None
    moves = run.rows(TransitionRow, THIS_EPISODE, episode)
    seeds = run.rows(SeedRow, THIS_EPISODE, episode)
    epochs = run.rows(EpochRow, THIS_EPISODE, episode)
    if not (moves or epochs):
        return None
    last = max(row.epoch for rows in (moves, epochs) for row in rows)
    horizon = max(run.row.horizon or 0, last)
    grown = seed_histories(run.row, last, seeds, moves)
    moves_of = grouped(moves, lambda row: row.slot)
    slots = list(enumerate(run.row.slots))
    alphas = [{row.epoch: row.alpha for row in seeds if row.slot == index} for index, _ in slots]
    return Lanes(
        name=episode_name(run, episode),
        horizon=horizon,
        epoch=last,
        scores=_scores(epochs, horizon, metric_of(run.row)),
        lanes=tuple(
            Lane(
                slot=name,
                stage=Stage(moves_of[index][-1].to_stage) if moves_of[index] else Stage.DORMANT,
                alpha=alphas[index].get(last),
                spans=_spans(moves_of[index], last, alphas[index]),
                marks=tuple(move for move in moves_of[index] if move.to_stage in MARKED),
                seeds=tuple(seed for seed in grown if seed.slot == name),
            )
            for index, name in slots
        ),
        metric=metric_of(run.row),
    )


def _scores(epochs: Sequence[EpochRow], end: int, metric: Metric) -> Series | None:
    if not epochs:
        return None
    values: dict[str, Values] = {
        "score": [getattr(row, metric.column) for row in epochs],
        "twin": [row.twin_score for row in epochs],
    }
    return Series("epoch", end, tuple(AxisBin(row.epoch, row.epoch) for row in epochs), values, metric)


def _spans(moves: Sequence[TransitionRow], last: int, alphas: Mapping[int, float]) -> tuple[Span, ...]:
    ends = [*(move.epoch for move in moves[1:]), last]
    return tuple(
        Span(stage, move.epoch, end, tuple(_alpha(stage, epoch, alphas) for epoch in range(move.epoch, end)))
        for move, end in zip(moves, ends, strict=False)
        if end > move.epoch and (stage := Stage(move.to_stage)) is not Stage.DORMANT
    )


def _alpha(stage: Stage, epoch: int, alphas: Mapping[int, float]) -> float | None:
    """Return the alpha of a seed in the epoch after ``epoch``; 0 for a seed that is not blended, None if
    alpha was not recorded.
    """
    return alphas.get(epoch, 0.0 if alphas and stage not in FORWARD_STAGES else None)


# --- drawing ----------------------------------------------------------------------------------------


def draw_lanes(found: Lanes, compared: Lanes | None = None) -> Picture:
    """Draw scores and stages of all slots of an episode, on axes that include a second episode if given."""
    both = [found] if compared is None else [found, compared]
    names = [svg.shorten(lane.slot, _NAME_LETTERS) for one in both for lane in one.lanes]
    left = max(48.0, *(svg.width_of(slot) + 10 for slot in names), 0.0)
    x = AxisScale(0, max(one.horizon for one in both), left, _RIGHT)
    bottom = _FIRST_LANE + _LANE * len(found.lanes)
    tops = [_FIRST_LANE + _LANE * index for index in range(len(found.lanes))]
    seeds = [seed for lane in found.lanes for seed in lane.seeds]
    return Picture(
        svg=svg.drawing(
            bottom + 54,
            f"Slots and {found.metric.name} of {found.name}",
            _describe(found),
            x_axis(x, bottom, "epoch", top=_SCORES[0]),
            *_draw_scores(found, x, [one.scores for one in both if one.scores is not None]),
            *(_draw_lane(lane, found.metric, x, top) for lane, top in zip(found.lanes, tops, strict=True)),
            _draw_key(found, bottom + 46),
        ),
        columns=["slot", "seed", "born", "course", "fate", "contribution", "parameters"],
        rows=[_cells(seed, found.metric) for seed in sorted(seeds, key=lambda seed: seed.seed)],
        caption=_caption(found),
    )


def _cells(seed: SeedHistory, metric: Metric) -> list[str]:
    fate = seed.fate if seed.fate == "alive" else f"{seed.fate} after {seed.fate_epoch}"
    fate = f"{fate}: {seed.reason}" if seed.reason else fate
    worth = metric.gain_with_error(seed.contribution, seed.contribution_error)
    about = [seed.slot, seed.blueprint, str(seed.germinated_at), seed.course]
    return [*about, fate, worth, notation.count(seed.params)]


def _describe(found: Lanes) -> str:
    seeds = [seed for lane in found.lanes for seed in lane.seeds]
    kept = [seed for seed in seeds if seed.fate in ("fossilized", "alive")]
    held = ", ".join(f"{seed.blueprint} in {seed.slot}" for seed in kept) or "no seed"
    metric = found.metric
    score, twin = (metric.text(value) for value in found.last_scores)
    scores = f"the {metric.name} is {score}, the twin's {twin}"
    return f"After epoch {found.epoch} {scores}; the network holds {held}."


def _caption(found: Lanes) -> str:
    known = any(alpha is not None for lane in found.lanes for span in lane.spans for alpha in span.alphas)
    height = "The filled height of a bar is alpha." if known else "Alpha was not recorded: bars are full."
    twin = "" if found.last_scores[1] is None else " Dotted line: the do-nothing twin."
    return (
        f"{found.name.capitalize()}. {height}{twin} Right of a slot: {found.metric.lost} without its"
        " seed, and the seed's parameters."
    )


def _draw_key(found: Lanes, baseline: float) -> Markup:
    """Draw the legend of the stages and symbols that occur in the chart of slots."""
    stages = {span.stage for lane in found.lanes for span in lane.spans} - COOLING_STAGES
    marks = {Stage(mark.to_stage) for lane in found.lanes for mark in lane.marks}
    parts, x = [], 6.0
    for stage in LOOKS:
        if stage in marks:
            parts.append(_shape(stage, x + 2, baseline - 4))
        elif stage in stages:
            look = stage.name.lower() if stage is not Stage.TRAINING else "tint training"
            parts.append(svg.rectangle(x - 4, baseline - 10, 12, 11, look))
            parts.append(_texture(stage, x - 4, x + 8, baseline - 10, 11))
        if stage in stages | marks:
            name = stage.name.lower()
            parts.append(svg.text(x + 12, baseline, name, "dim"))
            x += svg.width_of(name) + 22
    return svg.group(*parts)


# --- score ------------------------------------------------------------------------------------------


def _draw_scores(found: Lanes, x: AxisScale, held: Sequence[Series]) -> Iterator[Markup]:
    """Draw the scores of an episode; the vertical axis includes ``held``, the scores of all compared
    episodes.
    """
    scores = found.scores
    if scores is None:
        return
    panel = _panel(scores)
    values = [value for one in held for value in _panel(one).reached()]
    if not values:
        return
    y = panel_scale(panel, values, *_SCORES)
    yield draw_panel(scores.bins, panel, x, y)
    yield from _guides(found, scores, x, y)


def _panel(scores: Series) -> Panel:
    metric = scores.metric
    lines = [ChartData("twin", scores["twin"], metric.text, "twin")]
    lines.append(ChartData(metric.name, scores["score"], metric.text))
    bands = [] if None in scores["twin"] else [(scores["twin"], scores["score"])]
    return Panel(_SCORES[1] - _SCORES[0], lines, bands, near=0.0, most=metric.most)


def _guides(found: Lanes, scores: Series, x: AxisScale, y: AxisScale) -> Iterator[Markup]:
    """Draw a vertical line from the symbol of every fossilization up to the score at the same epoch."""
    kept = [
        (index, mark.epoch)
        for index, lane in enumerate(found.lanes)
        for mark in lane.marks
        if mark.to_stage == Stage.FOSSILIZED
    ]
    if len(kept) > _MOST_GUIDES:
        return
    score_at = {bin_.last: score for bin_, score in zip(scores.bins, scores["score"], strict=True)}
    for index, epoch in kept:
        score = score_at.get(epoch)
        if score is not None:
            foot = _FIRST_LANE + _LANE * index + _BAR_TOP
            yield svg.line(x(epoch), foot, x(epoch), y(score), "guide")
            yield svg.element("circle", cx=x(epoch), cy=y(score), r=4, class_="mark fossilized")


# --- slots ------------------------------------------------------------------------------------------


def _draw_lane(lane: Lane, metric: Metric, x: AxisScale, top: float) -> Markup:
    bar = top + _BAR_TOP
    middle = bar + _BAR / 2
    return svg.group(
        svg.path(_gaps(lane, x, middle), "empty"),
        svg.text(x.start - 8, middle + 5, svg.shorten(lane.slot, _NAME_LETTERS), "", "end"),
        *(_draw_span(span, x, bar) for span in lane.spans),
        *_seed_names(lane, x, middle + 5),
        *(_mark(one, lane.slot, x(one.epoch), bar - 3) for one in lane.marks),
        *_worth(lane, metric, middle),
    )


def _gaps(lane: Lane, x: AxisScale, middle: float) -> str:
    """Return the SVG path of a line that marks the epochs in which a slot is empty."""
    ends = [0.0, *(float(span.end) for span in lane.spans)]
    starts = [*(float(span.start) for span in lane.spans), x.high]
    return "".join(
        f"M{svg.number(x(end))} {svg.number(middle)}H{svg.number(x(start))}"
        for end, start in zip(ends, starts, strict=True)
        if start > end
    )


def _draw_span(span: Span, x: AxisScale, bar: float) -> Markup:
    start, end = x(span.start), x(span.end)
    name = span.stage.name.lower()
    if span.stage in COOLING_STAGES:
        return svg.line(start, bar + _BAR / 2, end, bar + _BAR / 2, f"cooling {name}-line")
    title = svg.element("title", f"{name}, epochs {span.start + 1} to {span.end}")
    outline = svg.rectangle(start, bar, end - start, _BAR, f"tint {name}", title)
    bottom = bar + _BAR
    filled = f"M{svg.number(start)} {svg.number(bottom)}"
    epoch = span.start
    for alpha, epochs in groupby(span.alphas):
        epoch += len(list(epochs))
        height = bottom - _BAR * (1.0 if alpha is None else alpha)
        filled += f"V{svg.number(height)}H{svg.number(x(epoch))}"
    bar_of_alpha = svg.path(f"{filled}V{svg.number(bottom)}z", name)
    return outline + bar_of_alpha + _texture(span.stage, start, end, bar, _BAR)


def _texture(stage: Stage, start: float, end: float, top: float, height: float) -> Markup:
    """Draw the stripes by which the stages TRAINING and HOLDING can be distinguished without colour."""
    if stage not in (Stage.TRAINING, Stage.HOLDING):
        return Markup("")
    middle = svg.number(top + height / 2)
    look = f"{stage.name.lower()}-texture"
    return svg.path(f"M{svg.number(start)} {middle}H{svg.number(end)}", look, stroke_width=height)


def _seed_names(lane: Lane, x: AxisScale, baseline: float) -> Iterator[Markup]:
    """Draw the name of each seed's blueprint: on its longest solid bar if the name fits, else across all its
    bars, else to the right of them.
    """
    next_starts = [*(x(seed.germinated_at) for seed in lane.seeds[1:]), x.stop]
    for seed, next_start in zip(lane.seeds, next_starts, strict=False):
        start, end, room = x(seed.germinated_at), x(seed.end), svg.width_of(seed.blueprint) + 12
        full = [one for one in lane.spans if _is_solid(one) and seed.germinated_at <= one.start < seed.end]
        longest = max(full, key=lambda span: span.end - span.start, default=None)
        if longest is not None and room <= x(longest.end) - x(longest.start):
            yield svg.text(x(longest.start) + 9, baseline, seed.blueprint, "on")
        elif room <= end - start:
            yield svg.text(start + 7, baseline, seed.blueprint, "halo")
        elif room <= next_start - end:
            yield svg.text(end + 6, baseline, seed.blueprint, "dim halo")


def _is_solid(span: Span) -> bool:
    """Return whether the bar of a stage has one solid colour: the stage is FOSSILIZED and alpha is 1."""
    return span.stage is Stage.FOSSILIZED and all(alpha is None or alpha > 0.99 for alpha in span.alphas)


def _worth(lane: Lane, metric: Metric, middle: float) -> Iterator[Markup]:
    """Draw contribution and parameters of the seed that is in the slot at the last epoch."""
    held = [seed for seed in lane.seeds if seed.fate in ("fossilized", "alive")]
    if not held:
        yield svg.text(_RIGHT + 8, middle + 5, notation.UNKNOWN, "dim")
        return
    seed = held[-1]
    worth = metric.gain_with_error(seed.contribution, seed.contribution_error)
    yield svg.text(_RIGHT + 8, middle - 3, worth, "strong")
    yield svg.text(_RIGHT + 8, middle + 14, f"{notation.count(seed.params)} params", "dim")


# --- marks, drawn as shapes because glyphs differ between fonts -------------------------------------


def _mark(move: TransitionRow, slot: str, x: float, y: float) -> Markup:
    """Draw a stage change as a ring (germinated), diamond (fossilized) or scissors (pruned), with a
    tooltip.
    """
    stage = Stage(move.to_stage)
    label = f"{slot} {stage.name.lower()} after epoch {move.epoch} ({move.cause}): {move.reason}"
    return svg.group(_shape(stage, x, y), svg.element("title", label))


def _shape(stage: Stage, x: float, y: float) -> Markup:
    """Draw the symbol of a stage, about ten SVG units wide."""
    if stage is Stage.GERMINATED:
        return svg.element("circle", cx=x, cy=y, r=4, class_="ring germinated")
    if stage is Stage.FOSSILIZED:
        return svg.path(f"M{svg.number(x)} {svg.number(y - 6)}l6 6l-6 6l-6 -6z", "mark fossilized")
    # The symbol of scissors has two crossing blades with grips below.
    blades = f"M{svg.number(x - 4)} {svg.number(y - 6)}l5.6 8.6m2.4 -8.6l-5.6 8.6"
    grips = "".join(
        f"M{svg.number(x + side - 1.8)} {svg.number(y + 4.2)}a1.8 1.8 0 1 0 3.6 0a1.8 1.8 0 1 0 -3.6 0"
        for side in (-2.6, 2.6)
    )
    return svg.path(blades + grips, "cut pruned-line")
