"""Entry point of ``esper COMMAND …``: calls the function of the command with the rest of the command line."""

from collections.abc import Sequence
from importlib import import_module

from esper import __version__
from esper.leyline import UnknownNameError
from esper.scripts.guard import run_main

COMMANDS = {
    "run": "Grow a network on a task and report what each seed contributed.",
    "train": "Train a policy that decides what grows.",
    "eval": "Compare a trained policy with all control arms.",
    "study": "Compare arms at equal compute: static sizes, controllers, policies.",
    "watch": "Show a run in the terminal, live while it is in progress.",
    "serve": "Show all runs of a folder on a live page in the browser.",
    "report": "Write the report of a run as one HTML file.",
    "runs": "List all runs with their state and score.",
    "sql": "Query the tables of a run in SQL.",
    "growbench": "Record decisions of growth, or train recorded ones again.",
    "bench": "Measure the run time of Esper's parts, each against a reference.",
    "export": "Export a run to TensorBoard, Trackio or Weights & Biases.",
}
"""Summary of each command; the function ``esper.scripts.NAME_command.NAME_command`` executes the command
``NAME``."""


def main(args: Sequence[str] | None = None) -> None:
    run_main(args, _overview(), _dispatch)


def _dispatch(words: Sequence[str]) -> None:
    command, *args = words
    if command == "--version":
        print(f"esper {__version__}")
        return
    if command not in COMMANDS:
        raise UnknownNameError("command", command[:80], COMMANDS, "See esper --help.")
    module = import_module(f"esper.scripts.{command}_command")
    getattr(module, f"{command}_command")(args)


def _overview() -> str:
    lines = [f"  {name:<11}{text}" for name, text in COMMANDS.items()]
    usage, more = "usage: esper COMMAND [flags]\n", "\nesper COMMAND --help lists its flags."
    return "\n".join([usage, *lines, more])
