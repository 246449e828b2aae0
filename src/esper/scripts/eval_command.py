"""``esper eval CHECKPOINT``: comparison of a trained policy with three controls (heuristic, random, off) on
test rng seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pydantic import Field
from rich import box
from rich.console import Console
from rich.table import Table

from esper.karn.statistics import estimate, paired_difference
from esper.leyline import notify, printable
from esper.run.run_config import RunConfig, Settings, checked, run_config
from esper.scripts.flags import parse_words, say_where
from esper.simic.config import MOST, MOST_SLOTS, EpisodeSettings, TrainingConfig
from esper.simic.rewards.families import rent_potential
from esper.study.processes import in_processes

if TYPE_CHECKING:
    from esper.tolaria.env import EpisodeReport

CONTROLS = ("heuristic", "random", "off")
Reports = list[list["EpisodeReport"]]
"""Episode reports of one arm, indexed ``[rng seed][episode]``."""


class EvaluationConfig(Settings, EpisodeSettings):
    """Compare a trained policy (argmax actions) with heuristic, random and off, on the test split with paired
    rng seeds.

    Task, slots, steps and rent default to those of the policy's training.
    """

    slots: int | None = Field(None, ge=1, le=MOST_SLOTS)
    """Number of blocks of the host, each with one slot."""
    rent: float = Field(TrainingConfig.model_fields["rent"].default, ge=0, allow_inf_nan=False)
    """Cost of 1,000 grown parameters, as a fraction of 100 points of score."""
    episodes: int = Field(20, ge=2, le=MOST)
    """Number of rng seeds per controller."""
    episodes_each: int = Field(1, ge=1, le=MOST)
    """Episodes per rng seed; their mean score is reported."""
    processes: int = Field(2, ge=1, le=1000)
    """Number of processes that run the episodes."""

    @property
    def environments(self) -> int:
        return self.episodes


def eval_command(args: Sequence[str]) -> None:
    needed = "the folder of a policy as its first word, such as runs/mine/best"
    words, asked = parse_words(EvaluationConfig, "esper eval CHECKPOINT", args, needed=needed)
    from esper.tolaria.seeding import TEST_SEEDS

    checkpoint = Path(words[0])
    config, shared = _resolve(checkpoint, asked.model_dump(exclude_unset=True))
    arms = {name: {**shared, "controller": name} for name in ("ppo", *CONTROLS)}
    arms["ppo"] |= {"checkpoint": checkpoint, "policy_device": config.policy_device}
    rng_seeds = TEST_SEEDS[: config.episodes]
    say_where(config)
    results = run_arms(
        arms, rng_seeds, episodes=config.episodes_each, processes=config.processes, devices=config.devices
    )
    Console().print(comparison_table(results, config.rent))


def _resolve(checkpoint: Path, given: Mapping[str, Any]) -> tuple[EvaluationConfig, dict[str, object]]:
    """Return the evaluation's configuration and the settings of all its runs; print how they differ from the
    policy's training.
    """
    from esper.run.factories import build_task
    from esper.tamiyo.policy.checkpoint import load_policy, read_training
    from esper.tamiyo.policy.features import check_capacity

    policy, trained = load_policy(checkpoint), read_training(checkpoint)
    defaults = asdict(trained) if trained else {}
    if "steps" in given:
        defaults["budget"] = None
    elif "budget" in given or defaults.get("budget") is not None:
        defaults["steps"] = None  # Also a training with a budget has a number of steps.
    config = checked(EvaluationConfig, {**defaults, **given})
    shared: dict[str, object] = {"task": config.task, "steps": config.steps, "budget": config.budget}
    shared |= {"data": config.data, "amp": config.amp}
    shared |= {"auto_forward": config.auto_forward, "slots": (str(config.slots),) if config.slots else ()}
    task = build_task(run_config(**shared))
    check_capacity(task.num_slots, policy.num_slots)
    asked = {"task": config.task, "slots": task.num_slots, "steps": task.horizon, "rent": config.rent}
    asked |= {} if config.budget is None else {"budget": config.budget}
    if trained is None:
        said = f"the policy in '{checkpoint}' does not say what it was trained on; evaluated on"
        asked_text = ", ".join(f"{name} {value}" for name, value in asked.items())
        notify(printable(f"{said} {asked_text}"))
    elif different := trained.differences(**asked, auto_forward=config.auto_forward):
        notify(printable(f"evaluated on {different}"))
    return config, shared


def run_arms(
    arms: Mapping[str, Mapping[str, object]],
    rng_seeds: Sequence[int],
    *,
    episodes: int = 1,
    processes: int = 1,
    devices: Sequence[str] = ("cpu",),
) -> dict[str, Reports]:
    """Run episodes of every arm with the same rng seeds, and return their reports.

    Args:
        arms: Settings of each arm's ``RunConfig``, by name of the arm.
        rng_seeds: Rng seeds that all arms run with; rng seed number ``i`` runs on device ``i`` modulo the
            number of devices.
        episodes: Number of episodes per rng seed.
        processes: Number of processes that share the episodes.
        devices: Devices on which hosts are trained.

    Returns:
        Episode reports by name of the arm, indexed ``[rng seed][episode]``.
    """
    from esper.tolaria.devices import device_of

    jobs = [
        (arm, run_config(**settings, rng_seed=rng_seed, episodes=episodes, devices=(device.name,)))
        for arm, settings in arms.items()
        for number, rng_seed in enumerate(rng_seeds)
        for device in [device_of(number, devices)]
    ]
    found = dict(in_processes(_run_seed, jobs, processes))
    return {arm: [found[arm, rng_seed] for rng_seed in rng_seeds] for arm in arms}


def _run_seed(arm: str, config: RunConfig) -> tuple[tuple[str, int], list[EpisodeReport]]:
    from esper.run.arm import run_one_episode

    return (arm, config.rng_seed), [run_one_episode(config, number) for number in range(config.episodes)]


def comparison_table(results: Mapping[str, Reports], rent: float) -> Table:
    """Return a table of test scores, before and after rent, with 95 % intervals and paired differences from
    the policy."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("controller", "test score", "ppo ahead by", "params", "after rent", "ppo ahead by"):
        table.add_column(heading, justify="left" if heading == "controller" else "right")
    bare = _means(results, lambda report: report.test_score)
    after_rent = _means(results, lambda report: _after_rent(report, rent))
    for arm, params in _means(results, lambda report: report.params).items():
        scores = _mean_and_lead(bare, arm), _mean_and_lead(after_rent, arm)
        table.add_row(arm, *scores[0], f"{fmean(params):,.0f}", *scores[1])
    return table


def _means(results: Mapping[str, Reports], value: Callable[[EpisodeReport], float]) -> dict[str, list[float]]:
    """Return, for each arm and each of its rng seeds, the mean of ``value`` over the episodes."""
    return {arm: [fmean(map(value, episodes)) for episodes in own] for arm, own in results.items()}


def _after_rent(report: EpisodeReport, rent: float) -> float:
    """Return the test score, from 0 to 100, minus ``rent`` per thousand grown parameters."""
    return report.test_score + 100.0 * float(rent_potential(report.params - report.host_params, rent))


def _mean_and_lead(scores: Mapping[str, Sequence[float]], arm: str) -> tuple[str, str]:
    """Return the mean score of an arm, and the paired difference of the policy's score from it, as text."""
    lead = "" if arm == "ppo" else str(paired_difference(scores["ppo"], scores[arm]))
    return str(estimate(scores[arm])), lead
