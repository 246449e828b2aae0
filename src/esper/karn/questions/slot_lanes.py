"""Stages of every slot over the epochs of one episode, with the score of the episode."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from esper.karn.metric import Metric, metric_of
from esper.karn.questions.episode_selection import (
    THIS_EPISODE,
    EpisodeKey,
    default_episode,
    episode_name,
    is_training,
)
from esper.karn.questions.series import AxisBin, Series, Values
from esper.karn.run import Run
from esper.karn.seed_histories import SeedHistory, grouped, seed_histories
from esper.leyline.rows import EpochRow, SeedRow, TransitionRow
from esper.leyline.stages import FORWARD_STAGES, Stage

MARKED: Final = (Stage.GERMINATED, Stage.FOSSILIZED, Stage.PRUNED)
"""Stages whose transitions are marked in the picture."""


class Span(NamedTuple):
    """A stage of a slot, from the end of epoch ``start`` to the end of epoch ``end``."""

    stage: Stage
    start: int
    end: int
    alphas: tuple[float | None, ...]
    """Blend weight in each epoch; None if it was not recorded."""


class Lane(NamedTuple):
    """Stages and seeds of one slot."""

    slot: str
    stage: Stage
    """Current stage."""
    alpha: float | None
    """Blend weight for the next epoch; None if the slot is empty or the weight was not recorded."""
    spans: tuple[Span, ...]
    """Spans in order; the slot is empty between them."""
    marks: tuple[TransitionRow, ...]
    """Transitions to one of the ``MARKED`` stages."""
    seeds: tuple[SeedHistory, ...]
    """Seeds in order of germination."""


class Lanes(NamedTuple):
    """Scores and slots of one episode over the same epochs."""

    episode: EpisodeKey
    name: str
    """Name of the episode."""
    horizon: int
    """End of the axis; the episode may have ended before, or be unfinished."""
    epoch: int
    """Last known epoch."""
    scores: Series | None
    """``score`` and ``twin`` after each epoch; None if no epoch is known."""
    lanes: tuple[Lane, ...]
    metric: Metric

    @property
    def last_scores(self) -> tuple[float | None, float | None]:
        """Score and twin after the last epoch."""
        return (self.scores.last("score"), self.scores.last("twin")) if self.scores else (None, None)


def lanes(run: Run, episode: EpisodeKey | None = None) -> Lanes | None:
    """Return the lanes of an episode, by default of the default episode; None without rows."""
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
    seeds_of = grouped(seeds, lambda row: row.slot)
    alphas_of = {slot: {row.epoch: row.alpha for row in rows} for slot, rows in seeds_of.items()}
    return Lanes(
        episode=episode,
        name=episode_name(episode, trained=is_training(run)),
        horizon=horizon,
        epoch=last,
        scores=_scores(epochs, horizon, metric_of(run.row)),
        lanes=tuple(
            Lane(
                slot=name,
                stage=Stage(moves_of[index][-1].to_stage) if moves_of[index] else Stage.DORMANT,
                alpha=alphas_of.get(index, {}).get(last),
                spans=_spans(moves_of[index], last, alphas_of.get(index, {})),
                marks=tuple(move for move in moves_of[index] if move.to_stage in MARKED),
                seeds=tuple(seed for seed in grown if seed.slot == name),
            )
            for index, name in enumerate(run.row.slots)
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
    """Return the weight in the next epoch; 0 for a seed outside the network if weights are recorded."""
    return alphas.get(epoch, 0.0 if alphas and stage not in FORWARD_STAGES else None)
