"""``esper eval CHECKPOINT``: a trained policy against every control, on rng seeds kept for that."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import Field
from rich import box
from rich.console import Console
from rich.table import Table

from esper.build import build_task
from esper.config import Settings, checked, run_config
from esper.karn.statistics import estimate, paired_difference
from esper.scripts.flags import parse_words, say_where
from esper.simic.settings import MOST, MOST_SLOTS, Flops, Hardware, TaskName
from esper.simic.training_config import TrainingConfig
from esper.study import Cell, means_by_rng_seed, run_study
from esper.tamiyo.policy.checkpoint import load_policy, read_training
from esper.tamiyo.policy.observer import check_capacity
from esper.tolaria.seeding import TEST_SEEDS

DESCRIPTION = (
    "Compare a trained policy with heuristic, random and off: test split, argmax, paired rng seeds."
    " Task, slots, steps and rent are those of the policy's training unless given."
)
CONTROLS = ("heuristic", "random", "off")


class EvaluationConfig(Settings, Hardware):
    """What to evaluate on; what is not given is taken from the policy, then from here."""

    task: TaskName = Field("digits_impaired", description="Task preset.")
    slots: int | None = Field(None, ge=1, le=MOST_SLOTS, description="Blocks and so slots of the host.")
    steps: int | None = Field(None, ge=1, le=MOST, description="Host epochs per episode.")
    budget: Flops | None = Field(None, description="FLOPs of an episode, such as 0.5T.")
    rent: float = Field(
        TrainingConfig.model_fields["rent"].default,
        ge=0,
        allow_inf_nan=False,
        description="Price of a thousand grown parameters, in lead of 100 points.",
    )
    auto_forward: bool = Field(True, description="Seeds change stage by themselves; else by the op ADVANCE.")
    episodes: int = Field(20, ge=2, le=MOST, description="Rng seeds per controller, of one episode each.")
    episodes_each: int = Field(1, ge=1, le=MOST, description="Episodes for each rng seed, whose mean counts.")
    processes: int = Field(2, ge=1, le=1_000, description="Processes that share the episodes.")

    @property
    def environments(self) -> int:
        return self.episodes


def eval_command(args: Sequence[str]) -> None:
    needed = "the folder of a policy as its first word, such as runs/mine/best"
    words, asked = parse_words(EvaluationConfig, "esper eval CHECKPOINT", DESCRIPTION, args, needed=needed)
    checkpoint = Path(words[0])
    config, shared = _resolve(checkpoint, asked.model_dump(exclude_unset=True))
    arms: dict[str, dict[str, object]] = {
        "ppo": {
            **shared,
            "controller": "ppo",
            "checkpoint": checkpoint,
            "policy_device": config.policy_device,
        },
        **{name: {**shared, "controller": name} for name in CONTROLS},
    }
    rng_seeds = TEST_SEEDS[: config.episodes]
    say_where(config)
    results = run_study(
        arms, rng_seeds, episodes=config.episodes_each, processes=config.processes, devices=config.devices
    )
    Console().print(comparison_table(results, config.rent))


def _resolve(checkpoint: Path, given: Mapping[str, Any]) -> tuple[EvaluationConfig, dict[str, object]]:
    """The configuration, and the settings of all runs; says on standard error what the training had else."""
    policy, trained = load_policy(checkpoint), read_training(checkpoint)
    config = checked(EvaluationConfig, {**(asdict(trained) if trained else {}), **given})
    length = {"steps": config.steps} if config.budget is None else {"budget": config.budget}
    shared: dict[str, object] = {"task": config.task, **length, "amp": config.amp}
    shared |= {"auto_forward": config.auto_forward, "slots": (str(config.slots),) if config.slots else ()}
    task = build_task(run_config(**shared))
    check_capacity(task.num_slots, policy.num_slots)
    asked = {"task": config.task, "slots": task.num_slots, "steps": task.horizon, "rent": config.rent}
    asked |= {} if config.budget is None else {"budget": config.budget}
    if trained is None:
        said = f"the policy in '{checkpoint}' does not say what it was trained on; evaluated on"
        print(f"esper: {said} {', '.join(f'{k} {v}' for k, v in asked.items())}", file=sys.stderr)
    elif different := trained.differences(**asked, auto_forward=config.auto_forward):
        print(f"esper: evaluated on {different}", file=sys.stderr)
    return config, shared


def comparison_table(results: Mapping[str, Sequence[Cell]], rent: float) -> Table:
    """Test scores, bare and after rent, with 95 % intervals and the policy's paired leads."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("controller", "test score", "ppo ahead by", "params", "after rent", "ppo ahead by"):
        table.add_column(heading, justify="left" if heading == "controller" else "right")
    bare = means_by_rng_seed(results, lambda cell: cell.test_score)
    after_rent = means_by_rng_seed(results, lambda cell: cell.after_rent(rent))
    for arm, cells in results.items():
        params = sum(cell.params for cell in cells) / len(cells)
        table.add_row(arm, *_mean_and_lead(bare, arm), f"{params:,.0f}", *_mean_and_lead(after_rent, arm))
    return table


def _mean_and_lead(scores: Mapping[str, Sequence[float]], arm: str) -> tuple[str, str]:
    """The arm's mean, and by how much the policy is ahead of it."""
    lead = "" if arm == "ppo" else str(paired_difference(scores["ppo"], scores[arm]))
    return str(estimate(scores[arm])), lead
