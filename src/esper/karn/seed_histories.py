"""What became of every seed of one episode, gathered from its transition and seed rows."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple, TypeVar

from esper.karn.palette import LOOKS
from esper.leyline.events import RunRow, SeedRow, TransitionRow
from esper.leyline.factored_actions import BLEND_IDS
from esper.leyline.stages import Stage

S = TypeVar("S", TransitionRow, SeedRow)
HORIZON: Final = "horizon"
"""Why an episode ends as planned, and the word by which a reason says that this end removed the seed."""
FATES: Final = {"fossilized": Stage.FOSSILIZED, "pruned": Stage.PRUNED, "removed at horizon": Stage.PRUNED}
"""The stage that each fate looks like; any other seed is alive."""


class SeedHistory(NamedTuple):
    """One seed from germination to its end; None is unknown."""

    seed: int
    """Serial number within its episode."""
    slot: str
    blueprint: str
    style: str | None
    germinated_at: int
    stages: tuple[tuple[Stage, int], ...]
    """Each stage and how many epochs it lasted; GERMINATED only if it lasted any."""
    fate: str
    """fossilized, pruned, removed at horizon or alive."""
    fate_epoch: int
    cause: str
    """Who decided the fate, as in the transition row."""
    reason: str
    params: int | None
    contribution: float | None
    contribution_error: float | None
    shapley: float | None

    @property
    def fate_stage(self) -> Stage | None:
        """The stage that its fate looks like; None: it is alive."""
        return FATES.get(self.fate)

    @property
    def end(self) -> int:
        """The epoch after which it is gone, or the last one that is known."""
        return self.germinated_at + sum(epochs for _, epochs in self.stages)

    @property
    def course(self) -> str:
        """The stages in short: ``T2 B3 H1 F`` trained for 2 epochs, blended for 3, held for 1, stayed."""
        return " ".join(
            LOOKS[stage].letter + ("" if stage is Stage.FOSSILIZED else str(epochs))
            for stage, epochs in self.stages
        )


def seed_histories(
    run: RunRow, last_epoch: int, seeds: Iterable[SeedRow], transitions: Iterable[TransitionRow]
) -> list[SeedHistory]:
    """The seeds of an episode in the order of their germination, from the rows of that episode alone."""
    moves_of = grouped((row for row in transitions if row.seed >= 0), lambda row: row.seed)
    rows_of = grouped(seeds, lambda row: row.seed)
    return [_seed_history(run, last_epoch, moves, rows_of[seed]) for seed, moves in sorted(moves_of.items())]


def grouped(rows: Iterable[S], key: Callable[[S], int]) -> Mapping[int, list[S]]:
    """The rows by a number of theirs, each group in their order."""
    found: dict[int, list[S]] = defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return found


def _seed_history(
    run: RunRow, last_epoch: int, moves: list[TransitionRow], rows: list[SeedRow]
) -> SeedHistory:
    fate, fate_epoch, reason = _fate(moves[-1], last_epoch)
    measured = next((row for row in reversed(rows) if row.contribution is not None), None)
    # For a seed that left in the epoch in which it was first measured, so that no seed row tells.
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
    """The fate, its epoch, and its reason unless that only repeats it."""
    stage = Stage(last.to_stage)
    if stage not in FATES.values():
        return "alive", last_epoch, ""
    if stage is Stage.PRUNED and HORIZON in last.reason:
        return "removed at horizon", last.epoch, ""
    fate = stage.name.lower()
    return fate, last.epoch, "" if last.reason == fate else last.reason
