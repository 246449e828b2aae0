"""Episodes of this experiment as records: arms × rng seeds, paired by rng seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from esper.run.arm import run_one_episode
from esper.run.run_config import RunConfig, run_config
from esper.simic.rewards.families import rent_potential
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

    def after_rent(self, rent: float) -> float:
        """Return the test score minus ``rent`` per thousand grown parameters, in points."""
        return self.test_score + 100.0 * float(rent_potential(self.params - self.host_params, rent))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_cell(arm: str, config: RunConfig, episode: int = 0) -> Cell:
    """Run one episode and return its record."""
    return Cell.of(arm, config.rng_seed, run_one_episode(config, episode), episode)


def run_cells(
    arms: Mapping[str, Mapping[str, object]], rng_seeds: Sequence[int], episodes: int
) -> dict[str, list[Cell]]:
    """Run every arm (settings of a ``RunConfig``) with every rng seed, in two processes."""
    runs = [(rng_seed, episode) for rng_seed in rng_seeds for episode in range(episodes)]
    jobs = [
        (arm, run_config(**settings, rng_seed=rng_seed), episode)
        for arm, settings in arms.items()
        for rng_seed, episode in runs
    ]
    results = {(cell.arm, cell.rng_seed, cell.episode): cell for cell in in_processes(run_cell, jobs, 2)}
    return {arm: [results[arm, *run] for run in runs] for arm in arms}


def means_by_rng_seed(
    results: Mapping[str, Sequence[Cell]], score: Callable[[Cell], float]
) -> dict[str, list[float]]:
    """Return one number per arm and rng seed, the mean over its episodes, in the order of the cells."""
    means: dict[str, list[float]] = {}
    for arm, cells in results.items():
        scores: dict[int, list[float]] = {}
        for cell in cells:
            scores.setdefault(cell.rng_seed, []).append(score(cell))
        means[arm] = [fmean(episodes) for episodes in scores.values()]
    return means
