"""History of every seed of one episode, from its transition rows and seed rows."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple, TypeVar

from esper.karn.palette import LOOKS
from esper.leyline import BLEND_IDS, RunRow, SeedRow, Stage, TransitionRow

S = TypeVar("S", TransitionRow, SeedRow)
HORIZON: Final = "horizon"
"""Value of ``ended_by`` for an episode that reached its horizon. If a seed is removed at the horizon, the
recorded reason for its removal contains the same word.
"""
FATES: Final = {"fossilized": Stage.FOSSILIZED, "pruned": Stage.PRUNED, "removed at horizon": Stage.PRUNED}
"""Stage whose glyph and colour represent each fate of a seed; the fate "alive" has no such stage."""


class SeedHistory(NamedTuple):
    """History of one seed from germination to its end; a value of None is unknown."""

    seed: int
    """Serial number of the seed within the episode."""
    slot: str
    blueprint: str
    style: str | None
    germinated_at: int
    stages: tuple[tuple[Stage, int], ...]
    """Stages of the seed, each with its number of epochs; GERMINATED is listed only if it lasted at least one
    epoch.
    """
    fate: str
    """Fate of the seed: fossilized, pruned, removed at horizon, or alive."""
    fate_epoch: int
    cause: str
    """Cause of the seed's last stage change, such as policy, governor or user."""
    reason: str
    params: int | None
    contribution: float | None
    contribution_error: float | None
    shapley: float | None

    @property
    def fate_stage(self) -> Stage | None:
        """Stage whose glyph and colour represent the fate of the seed; None if the seed is alive."""
        return FATES.get(self.fate)

    @property
    def end(self) -> int:
        """Last epoch of the seed, or the last known epoch of the episode if the seed is alive."""
        return self.germinated_at + sum(epochs for _, epochs in self.stages)

    @property
    def course(self) -> str:
        """Stages of the seed with numbers of epochs: ``T2 B3 H1 F`` is 2 epochs TRAINING, 3 BLENDING, 1
        HOLDING, then FOSSILIZED.
        """
        return " ".join(
            LOOKS[stage].letter + ("" if stage is Stage.FOSSILIZED else str(epochs))
            for stage, epochs in self.stages
        )


def seed_histories(
    run: RunRow, last_epoch: int, seeds: Iterable[SeedRow], transitions: Iterable[TransitionRow]
) -> list[SeedHistory]:
    """Return the histories of the seeds of one episode in order of germination.

    Args:
        run: Run row, which lists the names of slots and blueprints.
        last_epoch: Last known epoch of the episode.
        seeds: Seed rows of the episode, and of no other episode.
        transitions: Transition rows of the episode, and of no other episode.
    """
    moves_of = grouped((row for row in transitions if row.seed >= 0), lambda row: row.seed)
    rows_of = grouped(seeds, lambda row: row.seed)
    return [_seed_history(run, last_epoch, moves, rows_of[seed]) for seed, moves in sorted(moves_of.items())]


def grouped(rows: Iterable[S], key: Callable[[S], int]) -> Mapping[int, list[S]]:
    """Group rows by a key, in their original order within each group."""
    found: dict[int, list[S]] = defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return found


def _seed_history(
    run: RunRow, last_epoch: int, moves: list[TransitionRow], rows: list[SeedRow]
) -> SeedHistory:
    fate, fate_epoch, reason = _fate(moves[-1], last_epoch)
    measured = next((row for row in reversed(rows) if row.contribution is not None), None)
    # If a seed is removed in the epoch of its first measurement, its contribution is in a transition row and
    # in no seed row.
    at_a_move = next((move.contribution for move in reversed(moves) if move.contribution is not None), None)
    return SeedHistory(
        seed=moves[0].seed,
        slot=run.slots[moves[0].slot],
        blueprint=run.blueprints[moves[0].blueprint],
        style=BLEND_IDS[rows[-1].style] if rows else None,
        germinated_at=moves[0].epoch,
        stages=_stages(moves, last_epoch),
        fate=fate,
        fate_epoch=fate_epoch,
        cause=moves[-1].cause,
        reason=reason,
        params=rows[-1].params if rows else None,
        contribution=measured.contribution if measured else at_a_move,
        contribution_error=measured.contribution_error if measured else None,
        shapley=next((row.shapley for row in reversed(rows) if row.shapley is not None), None),
    )


def _stages(moves: Sequence[TransitionRow], last_epoch: int) -> tuple[tuple[Stage, int], ...]:
    ends = [later.epoch for _, later in pairwise(moves)] + [last_epoch]
    spans = [(Stage(move.to_stage), end - move.epoch) for move, end in zip(moves, ends, strict=True)]
    return tuple(
        (stage, epochs)
        for stage, epochs in spans
        if stage is not Stage.PRUNED and (epochs > 0 or stage is not Stage.GERMINATED)
    )


def _fate(last: TransitionRow, last_epoch: int) -> tuple[str, int, str]:
    """Return the fate of a seed, the epoch of the fate, and the recorded reason; the reason is empty if it
    equals the fate.
    """
    stage = Stage(last.to_stage)
    if stage not in FATES.values():
        return "alive", last_epoch, ""
    if stage is Stage.PRUNED and HORIZON in last.reason:
        return "removed at horizon", last.epoch, ""
    fate = stage.name.lower()
    return fate, last.epoch, "" if last.reason == fate else last.reason
