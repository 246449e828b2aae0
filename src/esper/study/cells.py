"""Arms × rng seeds: the same episodes under different controllers and settings, in parallel.

Every arm runs the same rng seeds, so that differences are paired: initialisation, data split and
data order of a seed are the same in all arms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from esper.run.factories import build_controller, build_task, build_vector, one_thread
from esper.run.run_config import RunConfig, run_config
from esper.simic.rewards.families import rent_potential
from esper.study.processes import in_processes
from esper.tolaria.devices import DEFAULT_DEVICE, device_of
from esper.tolaria.episode import run_episode
from esper.tolaria.episode_report import EpisodeReport


@dataclass(frozen=True, slots=True)
class Cell:
    """One episode: an arm with one rng seed, which may have several."""

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
        """What the report of an episode says of its committed network."""
        scores, params = (report.val_score, report.test_score), (report.host_params, report.params)
        return cls(arm, rng_seed, *scores, *params, report.flops, report.refused, episode)

    def after_rent(self, rent: float) -> float:
        """Test score less ``rent`` for a thousand grown parameters, in points: what was to be had."""
        return self.test_score + 100.0 * float(rent_potential(self.params - self.host_params, rent))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_cell(arm: str, config: RunConfig, episode: int = 0) -> Cell:
    """Run one episode and report its committed network."""
    with one_thread():
        vector = build_vector(config, build_task(config))
        vector.reset(episode)
        controller = build_controller(config.controller, config, vector.action_space)
        (report,) = run_episode(vector, controller, episode)
    return Cell.of(arm, config.rng_seed, report, episode)


def run_study(
    arms: Mapping[str, Mapping[str, object]],
    rng_seeds: Sequence[int],
    *,
    episodes: int = 1,
    processes: int = 2,
    devices: Sequence[str] = (DEFAULT_DEVICE.name,),
    on_cell: Callable[[Cell], None] = lambda cell: None,
) -> dict[str, list[Cell]]:
    """Run every arm (settings of a ``RunConfig``) with every rng seed, so many episodes of each.

    Rng seeds are dealt out to the ``devices`` in turn, so that all arms of one run on the same.
    Cells come in the order of rng seeds, and of their episodes.
    """
    runs = [(rng_seed, episode) for rng_seed in rng_seeds for episode in range(episodes)]
    device = {rng_seed: (device_of(at, devices).name,) for at, rng_seed in enumerate(rng_seeds)}
    jobs = [
        (arm, run_config(**settings, rng_seed=rng_seed, devices=device[rng_seed]), episode)
        for arm, settings in arms.items()
        for rng_seed, episode in runs
    ]
    results: dict[tuple[str, int, int], Cell] = {}
    for cell in in_processes(run_cell, jobs, processes):
        results[cell.arm, cell.rng_seed, cell.episode] = cell
        on_cell(cell)
    return {arm: [results[arm, *run] for run in runs] for arm in arms}


def means_by_rng_seed(
    results: Mapping[str, Sequence[Cell]], score: Callable[[Cell], float]
) -> dict[str, list[float]]:
    """Of every arm one number for each rng seed, the mean over its episodes, in the order of the cells."""
    means: dict[str, list[float]] = {}
    for arm, cells in results.items():
        scores: dict[int, list[float]] = {}
        for cell in cells:
            scores.setdefault(cell.rng_seed, []).append(score(cell))
        means[arm] = [fmean(episodes) for episodes in scores.values()]
    return means
