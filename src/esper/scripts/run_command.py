"""``esper run``: grow a network, watch it, and end in a table."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from esper.build import build_task
from esper.config import RunConfig
from esper.karn import summary
from esper.karn.query import read_rows
from esper.karn.terminal import TerminalView
from esper.leyline.events import EpisodeRow, RunRow, SeedRow, TransitionRow
from esper.runner import check_names, default_directory, run_arm
from esper.scripts.flags import parse_run
from esper.tamiyo.policy.checkpoint import read_training

DESCRIPTION = "Grow a network on a task and report what each seed contributed."


def run_command(args: Sequence[str]) -> None:
    """Parse ``args`` and run."""
    run(parse_run("esper run", DESCRIPTION, args))


def run(config: RunConfig) -> None:
    """Run the controller and its controls, then print what came of it."""
    check_names(config)
    _say_what_the_policy_was_not_trained_on(config)
    base = config.out or default_directory(config)
    console = Console()
    arms: dict[str, Path] = {}
    for controller in (config.controller, *config.against):
        directory = base / controller if config.against else base
        arms[controller] = _run_shown(config, controller, directory, console)
    if config.as_json:
        print(json.dumps(_result(arms), indent=2))
    else:
        _print_tables(arms, console)


def _say_what_the_policy_was_not_trained_on(config: RunConfig) -> None:
    trained = read_training(config.checkpoint) if config.checkpoint else None
    task = build_task(config)
    asked = {"task": config.task, "slots": task.num_slots, "steps": task.horizon}
    if trained and (different := trained.differences(**asked, auto_forward=config.auto_forward)):
        print(f"esper: the policy decides on {different}", file=sys.stderr)


def _run_shown(config: RunConfig, controller: str, directory: Path, console: Console) -> Path:
    if config.as_json:
        return run_arm(config, controller, directory)
    with TerminalView(directory, console) as view:
        return run_arm(config, controller, directory, refresh=view.refresh)


def _print_tables(arms: dict[str, Path], console: Console) -> None:
    for directory in arms.values():
        run, episodes, seeds, transitions = _rows(directory)
        for episode in episodes:
            console.print()
            console.print(summary.episode_summary(run, episode, seeds, transitions))
    if len(arms) > 1:
        last = [(controller, _rows(directory)[1][-1]) for controller, directory in arms.items()]
        console.print()
        console.print(summary.comparison(last))
    console.print()
    for directory in arms.values():
        console.print(
            f"run saved in {directory} (telemetry/, model/)", soft_wrap=True, highlight=False, markup=False
        )


def _result(arms: dict[str, Path]) -> dict[str, object]:
    result: dict[str, object] = {}
    for controller, directory in arms.items():
        run, episodes, seeds, transitions = _rows(directory)
        result[controller] = {
            "directory": str(directory),
            "episodes": [summary.as_json(run, e, seeds, transitions) for e in episodes],
        }
    return result


def _rows(directory: Path) -> tuple[RunRow, list[EpisodeRow], list[SeedRow], list[TransitionRow]]:
    return (
        read_rows(directory, RunRow)[0],
        read_rows(directory, EpisodeRow),
        read_rows(directory, SeedRow),
        read_rows(directory, TransitionRow),
    )
