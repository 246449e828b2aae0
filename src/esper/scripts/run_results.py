"""Execution of the arms of ``esper run``, with their progress and a table of results."""

import json
from collections.abc import Iterator
from contextlib import nullcontext

from rich.console import Console

from esper.karn import summary
from esper.karn.questions.episode_selection import THIS_EPISODE, EpisodeKey
from esper.karn.run import Run, open_run
from esper.karn.seed_histories import SeedHistory, seed_histories
from esper.karn.terminal import TerminalView
from esper.leyline import EpisodeRow, RunRow, SeedRow, TransitionRow, notify, printable
from esper.run.arm import check_names, free_directory, run_arm
from esper.run.factories import build_task
from esper.run.run_config import RunConfig
from esper.scripts.flags import say_where
from esper.tamiyo.policy.checkpoint import read_training


def run(config: RunConfig) -> None:
    """Run the chosen controller and the controllers to compare with, then print the results."""
    check_names(config)
    say_where(config)
    _say_what_the_policy_was_not_trained_on(config)
    base = config.out or free_directory(f"{config.task}-{config.controller}-seed{config.rng_seed}")
    console = Console()
    arms: dict[str, Run] = {}
    for controller in (config.controller, *config.against):
        directory = base / controller if config.against else base
        with nullcontext() if config.as_json else TerminalView(directory, console) as view:
            run_arm(config, controller, directory, refresh=view.refresh if view else lambda: None)
        arms[controller] = open_run(directory)
    if config.as_json:
        found = {
            name: {"directory": str(run.path), "episodes": [summary.as_json(*one) for one in _episodes(run)]}
            for name, run in arms.items()
        }
        print(json.dumps(found, indent=2))
    else:
        _print_tables(arms, console)


def _say_what_the_policy_was_not_trained_on(config: RunConfig) -> None:
    trained = read_training(config.checkpoint) if config.checkpoint else None
    task = build_task(config)
    asked = {"task": config.task, "slots": task.num_slots, "steps": task.horizon}
    if trained and (different := trained.differences(**asked, auto_forward=config.auto_forward)):
        notify(printable(f"the policy decides on {different}"))


def _episodes(run: Run) -> Iterator[tuple[RunRow, EpisodeRow, list[SeedHistory]]]:
    """Yield the run row, the episode row and the seed histories of each episode of a run."""
    for episode in run.rows(EpisodeRow):
        own = THIS_EPISODE, EpisodeKey.of(episode)
        seeds, moves = run.rows(SeedRow, *own), run.rows(TransitionRow, *own)
        yield run.row, episode, seed_histories(run.row, episode.epoch, seeds, moves)


def _print_tables(arms: dict[str, Run], console: Console) -> None:
    for run in arms.values():
        for episode in _episodes(run):
            console.print()
            console.print(summary.episode_summary(*episode))
    if len(arms) > 1:
        console.print()
        console.print(summary.comparison([(name, run.rows(EpisodeRow)[-1]) for name, run in arms.items()]))
    console.print()
    for run in arms.values():
        print(f"run saved in {printable(str(run.path))} (telemetry/, model/)")
