"""Episodes of an experiment as records: arms × rng seeds, paired by rng seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from esper.run.arm import run_one_episode
from esper.run.run_config import RunConfig, run_config
from esper.simic.rewards.families import rent_potential
from esper.study.processes import in_processes
from esper.tolaria.env import EpisodeReport


@dataclass(frozen=True, slots=True)
class Cell:
    """Record of one episode of an arm; the scores are those of the committed network."""

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

    def after_rent(self, rent: float) -> float:
        """Return the test score minus ``rent`` per thousand grown parameters, in points."""
        return self.test_score + 100.0 * float(rent_potential(self.params - self.host_params, rent))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_cell(arm: str, config: RunConfig, episode: int = 0) -> Cell:
    """Run one episode and return its record."""
    return Cell.of(arm, config.rng_seed, run_one_episode(config, episode), episode)


def run_cells(
    arms: Mapping[str, Mapping[str, object]],
    rng_seeds: Sequence[int],
    on_cell: Callable[[Cell], None] = lambda cell: None,
    *,
    episodes: int = 1,
) -> dict[str, list[Cell]]:
    """Run the episodes of every arm (settings of a ``RunConfig``) and rng seed, in two processes.

    Args:
        arms: Settings of each arm by its name.
        rng_seeds: Rng seeds, the same for every arm.
        on_cell: Called with each record when its episode has ended.
        episodes: Number of episodes per arm and rng seed.
    """
    runs = [(rng_seed, episode) for rng_seed in rng_seeds for episode in range(episodes)]
    jobs = [
        (arm, run_config(**settings, rng_seed=rng_seed), episode)
        for arm, settings in arms.items()
        for rng_seed, episode in runs
    ]
    results: dict[tuple[str, int, int], Cell] = {}
    for cell in in_processes(run_cell, jobs, 2):
        results[cell.arm, cell.rng_seed, cell.episode] = cell
        on_cell(cell)
    return {arm: [results[arm, *run] for run in runs] for arm in arms}


def means_by_rng_seed(
    results: Mapping[str, Sequence[Cell]], score: Callable[[Cell], float]
) -> dict[str, list[float]]:
    """Return the mean score over the episodes of each arm and rng seed, in the order of the cells."""
    means: dict[str, list[float]] = {}
    for arm, cells in results.items():
        scores: dict[int, list[float]] = {}
        for cell in cells:
            scores.setdefault(cell.rng_seed, []).append(score(cell))
        means[arm] = [fmean(episodes) for episodes in scores.values()]
    return means
