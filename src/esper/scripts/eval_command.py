"""``esper eval CHECKPOINT``: a trained policy against every control, on rng seeds kept for that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field
from rich import box
from rich.console import Console
from rich.table import Table

from esper.config import checked
from esper.karn.statistics import estimate, paired_difference
from esper.leyline.errors import EsperError
from esper.scripts.flags import parse_flags
from esper.simic.config import TaskName, TrainingConfig
from esper.study import Cell, means_by_rng_seed, run_study
from esper.tamiyo.policy.checkpoint import load_policy
from esper.tolaria.seeding import TEST_SEEDS

DESCRIPTION = "Compare a trained policy with heuristic, random and off: test split, argmax, paired rng seeds."


class EvaluationConfig(BaseModel):
    """What to evaluate on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    task: TaskName = Field("digits_impaired", description="Task preset.")
    episodes: int = Field(20, ge=2, description="Episodes per controller, each with its own rng seed.")
    episodes_each: int = Field(
        1,
        ge=1,
        description="So many for every rng seed, which counts with their mean.",
    )
    steps: int | None = Field(None, ge=1, description="Host epochs per episode; the preset's unless given.")
    rent: float = Field(
        TrainingConfig.model_fields["rent"].default,
        ge=0,
        allow_inf_nan=False,
        description="Price of a thousand grown parameters, in lead of 100 points.",
    )
    processes: int = Field(2, ge=1, description="Processes that share the episodes.")


def eval_command(args: Sequence[str]) -> None:
    """The first word is the checkpoint, the rest are flags."""
    if not args or args[0].startswith("-"):
        parse_flags(EvaluationConfig, "esper eval CHECKPOINT", DESCRIPTION, args)
        raise EsperError("esper eval needs the folder of a policy as its first word, such as runs/mine/best")
    checkpoint = Path(args[0])
    given, _ = parse_flags(EvaluationConfig, "esper eval CHECKPOINT", DESCRIPTION, args[1:])
    config = checked(EvaluationConfig, given)
    load_policy(checkpoint)
    shared = {"task": config.task, "steps": config.steps}
    arms: dict[str, dict[str, object]] = {
        "ppo": {**shared, "controller": "ppo", "checkpoint": checkpoint},
        **{name: {**shared, "controller": name} for name in ("heuristic", "random", "off")},
    }
    results = run_study(
        arms, TEST_SEEDS[: config.episodes], episodes=config.episodes_each, processes=config.processes
    )
    Console().print(comparison_table(results, config.rent))


def comparison_table(results: Mapping[str, Sequence[Cell]], rent: float) -> Table:
    """Test scores, bare and after rent, with 95 % intervals and the policy's paired leads."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("controller", "test score", "ppo ahead by", "params", "after rent", "ppo ahead by"):
        table.add_column(heading, justify="left" if heading == "controller" else "right")
    bare = means_by_rng_seed(results, lambda cell: cell.test_score)
    paid = means_by_rng_seed(results, lambda cell: cell.after_rent(rent))
    for arm, cells in results.items():
        params = sum(cell.params for cell in cells) / len(cells)
        table.add_row(arm, *_standing(bare, arm), f"{params:,.0f}", *_standing(paid, arm))
    return table


def _standing(scores: Mapping[str, Sequence[float]], arm: str) -> tuple[str, str]:
    """The arm's mean, and the policy's lead over it."""
    lead = "" if arm == "ppo" else str(paired_difference(scores["ppo"], scores[arm]))
    return str(estimate(scores[arm])), lead
