"""Do seeds help or hinder each other: contributions and pair interactions from on/off configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from esper.karn.questions.episodes import EpisodeKey, default_episode
from esper.karn.run import Run

Configuration = tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Interactions:
    """One episode at the last epoch whose configurations were scored."""

    episode: EpisodeKey
    epoch: int
    slots: tuple[str, ...]
    """Those that were switched."""
    score: float
    """With all of them on."""
    scores: Mapping[Configuration, float]
    """By which of these slots were on."""
    matrix: tuple[tuple[float | None, ...], ...]
    """On the diagonal what a slot contributes, elsewhere what two add beyond their own; None: unknown."""


def interactions(run: Run, episode: EpisodeKey | None = None) -> Interactions | None:
    """Of one episode; without one, of the run's default episode. None: no configuration was scored."""
    episode = default_episode(run) if episode is None else episode
    if episode is None:
        return None
    found = run.sql(
        """
        SELECT epoch, "on", score FROM counterfactual WHERE env = ? AND episode = ?
        AND epoch = (SELECT max(epoch) FROM counterfactual WHERE env = ? AND episode = ?)
        """,
        [*episode, *episode],
    ).fetchall()
    if not found:
        return None
    switched = [slot for slot in range(len(run.row.slots)) if len({on[slot] for _, on, _ in found}) > 1]
    scores = {tuple(on[slot] for slot in switched): score for _, on, score in found}
    everything = (True,) * len(switched)
    if not switched or everything not in scores:  # a killed run may have written but one of them
        return None
    return Interactions(
        episode=episode,
        epoch=found[0][0],
        slots=tuple(run.row.slots[slot] for slot in switched),
        score=scores[everything],
        scores=scores,
        matrix=tuple(
            tuple(_effect(scores, {first, second}) for second in range(len(switched)))
            for first in range(len(switched))
        ),
    )


def _effect(scores: Mapping[Configuration, float], slots: set[int]) -> float | None:
    """v(all) − v(without one), or v(all) − v(without i) − v(without j) + v(without both)."""
    count = len(next(iter(scores)))

    def without(off: set[int]) -> float | None:
        return scores.get(tuple(slot not in off for slot in range(count)))

    whole, single, rest = without(set()), [without({slot}) for slot in slots], without(slots)
    if whole is None or rest is None or None in single:
        return None
    if len(slots) == 1:
        return whole - rest
    return whole - sum(value for value in single if value is not None) + rest
