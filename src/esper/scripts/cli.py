"""Entry point of ``esper COMMAND …``: calls the function of the command with its flags."""

from collections.abc import Sequence
from importlib import import_module

from esper import __version__
from esper.leyline.errors import UnknownNameError
from esper.scripts.guard import run_main

COMMANDS = {
    "run": "Grow a network on a task and report what each seed contributed.",
    "train": "Teach a policy to decide what grows.",
    "eval": "Compare a trained policy with every control.",
    "study": "Compare arms at equal compute: static sizes, controllers, policies.",
    "watch": "Follow a running run, or show a finished one.",
    "serve": "Show all runs of a folder on a live page.",
    "report": "Show what a run came to, in one HTML file.",
    "runs": "List all runs with their state and score.",
    "sql": "Ask a run's tables a question in SQL.",
    "bench": "Measure what Esper's parts cost, each against a reference.",
    "export": "Write a run's numbers for TensorBoard, Trackio or Weights & Biases.",
}
"""Summary of each command; ``esper.scripts.NAME_command.NAME_command`` runs it."""


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
    lines = [f"  {name:<8}{text}" for name, text in COMMANDS.items()]
    usage, more = "usage: esper COMMAND [flags]\n", "\nesper COMMAND --help lists its flags."
    return "\n".join([usage, *lines, more])
