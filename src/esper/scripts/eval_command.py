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
from esper.study import Cell, run_study
from esper.tamiyo.policy.checkpoint import load_policy
from esper.tolaria.seeding import TEST_SEEDS
from esper.tolaria.tasks import task_named

DESCRIPTION = "Compare a trained policy with heuristic, random and off: test split, argmax, paired rng seeds."


class EvaluationConfig(BaseModel):
    """What to evaluate on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    task: str = Field("digits_impaired", description="Task preset.")
    lives: int = Field(20, ge=2, description="Lives per decider, each with its own rng seed.")
    steps: int | None = Field(None, ge=1, description="Host epochs per life; the preset's unless given.")
    processes: int = Field(2, ge=1, description="Processes that share the lives.")


def eval_command(args: Sequence[str]) -> None:
    """The first word is the checkpoint, the rest are flags."""
    if not args or args[0].startswith("-"):
        parse_flags(EvaluationConfig, "esper eval CHECKPOINT", DESCRIPTION, args)
        raise EsperError("esper eval needs the folder of a policy as its first word, such as runs/mine/best")
    checkpoint = Path(args[0])
    given, _ = parse_flags(EvaluationConfig, "esper eval CHECKPOINT", DESCRIPTION, args[1:])
    config = checked(EvaluationConfig, given)
    task_named(config.task)
    load_policy(checkpoint)
    shared = {"task": config.task, "steps": config.steps}
    arms: dict[str, dict[str, object]] = {
        "ppo": {**shared, "decider": "ppo", "checkpoint": checkpoint},
        **{name: {**shared, "decider": name} for name in ("heuristic", "random", "off")},
    }
    results = run_study(arms, TEST_SEEDS[: config.lives], processes=config.processes)
    Console().print(comparison_table(results))


def comparison_table(results: Mapping[str, Sequence[Cell]]) -> Table:
    """Test scores with 95 % intervals, and the policy's paired lead over each control."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("decider", "test score", "ppo ahead by", "params"):
        table.add_column(heading, justify="left" if heading == "decider" else "right")
    scores = {arm: [cell.test_score for cell in cells] for arm, cells in results.items()}
    for arm, cells in results.items():
        lead = "" if arm == "ppo" else str(paired_difference(scores["ppo"], scores[arm]))
        params = sum(cell.params for cell in cells) / len(cells)
        table.add_row(arm, str(estimate(scores[arm])), lead, f"{params:,.0f}")
    return table
