"""``esper run``: grow a network, watch it, and end in a table."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from esper.build import build_task
from esper.config import RunConfig, checked
from esper.karn import summary
from esper.karn.query import read_rows
from esper.karn.terminal import TerminalView
from esper.leyline.events import EpisodeRow, RunRow, SeedRow, TransitionRow
from esper.runner import check_names, free_directory, run_arm
from esper.scripts.flags import parse_flags
from esper.tamiyo.policy.checkpoint import read_training

DESCRIPTION = "Grow a network on a task and report what each seed contributed."


def run_command(
    args: Sequence[str],
    *,
    prog: str = "esper run",
    renamed: dict[str, str] | None = None,
    controller: str | None = None,
) -> None:
    """Parse ``args`` and run; ``renamed`` gives settings other flags, ``controller`` takes its flag away."""
    fixed = {} if controller is None else {"controller": controller}
    given, _ = parse_flags(RunConfig, prog, DESCRIPTION, args, renamed=renamed, without=fixed)
    run(checked(RunConfig, given | fixed))


def run(config: RunConfig) -> None:
    """Run the controller and its controls, then print what came of it."""
    check_names(config)
    _say_what_the_policy_was_not_trained_on(config)
    base = config.out or free_directory(f"{config.task}-{config.controller}-seed{config.rng_seed}")
    console = Console()
    arms: dict[str, Rows] = {}
    for controller in (config.controller, *config.against):
        directory = base / controller if config.against else base
        with nullcontext() if config.as_json else TerminalView(directory, console) as view:
            run_arm(config, controller, directory, refresh=view.refresh if view else lambda: None)
        arms[controller] = Rows.of(directory)
    if config.as_json:
        print(json.dumps({controller: rows.as_json() for controller, rows in arms.items()}, indent=2))
    else:
        _print_tables(arms, console)


def _say_what_the_policy_was_not_trained_on(config: RunConfig) -> None:
    trained = read_training(config.checkpoint) if config.checkpoint else None
    task = build_task(config)
    asked = {"task": config.task, "slots": task.num_slots, "steps": task.horizon}
    if trained and (different := trained.differences(**asked, auto_forward=config.auto_forward)):
        print(f"esper: the policy decides on {different}", file=sys.stderr)


class Rows(NamedTuple):
    """What one controller's run recorded, as far as it is shown at the end."""

    directory: Path
    run: RunRow
    episodes: list[EpisodeRow]
    seeds: list[SeedRow]
    transitions: list[TransitionRow]

    @classmethod
    def of(cls, directory: Path) -> Rows:
        rest = (read_rows(directory, kind) for kind in (EpisodeRow, SeedRow, TransitionRow))
        return cls._make((directory, *read_rows(directory, RunRow), *rest))

    def as_json(self) -> dict[str, object]:
        episodes = [summary.as_json(self.run, e, self.seeds, self.transitions) for e in self.episodes]
        return {"directory": str(self.directory), "episodes": episodes}


def _print_tables(arms: dict[str, Rows], console: Console) -> None:
    for rows in arms.values():
        for episode in rows.episodes:
            console.print()
            console.print(summary.episode_summary(rows.run, episode, rows.seeds, rows.transitions))
    if len(arms) > 1:
        console.print()
        console.print(summary.comparison([(name, rows.episodes[-1]) for name, rows in arms.items()]))
    console.print()
    for rows in arms.values():
        said = f"run saved in {rows.directory} (telemetry/, model/)"
        console.print(said, soft_wrap=True, highlight=False, markup=False)
