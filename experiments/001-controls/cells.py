"""Episodes of this experiment as records: arms × rng seeds, paired by rng seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from esper.run.arm import run_one_episode
from esper.run.run_config import RunConfig, run_config
from esper.study.processes import in_processes
from esper.tolaria.episode_report import EpisodeReport


@dataclass(frozen=True, slots=True)
class Cell:
    """One episode of an arm; the scores are those of the committed network."""

    arm: str
    rng_seed: int
    val_score: float
    test_score: float
    host_params: int
    params: int
    flops: dict[str, int]
    refused: int
    episode: int = 0

    @classmethod
    def of(cls, arm: str, rng_seed: int, report: EpisodeReport, episode: int = 0) -> Cell:
        names = ("val_score", "test_score", "host_params", "params", "flops", "refused")
        return cls(arm, rng_seed, **{name: getattr(report, name) for name in names}, episode=episode)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_cell(arm: str, config: RunConfig, episode: int = 0) -> Cell:
    """Run one episode and return its record."""
    return Cell.of(arm, config.rng_seed, run_one_episode(config, episode), episode)


def run_cells(
    arms: Mapping[str, Mapping[str, object]], rng_seeds: Sequence[int], on_cell: Callable[[Cell], None]
) -> dict[str, list[Cell]]:
    """Run every arm (settings of a ``RunConfig``) with every rng seed, in two processes."""
    jobs = [
        (arm, run_config(**settings, rng_seed=rng_seed))
        for arm, settings in arms.items()
        for rng_seed in rng_seeds
    ]
    results: dict[tuple[str, int], Cell] = {}
    for cell in in_processes(run_cell, jobs, 2):
        results[cell.arm, cell.rng_seed] = cell
        on_cell(cell)
    return {arm: [results[arm, rng_seed] for rng_seed in rng_seeds] for arm in arms}
