"""``python -m esper.scripts.train CONTROLLER …``: the same run, with the decision maker as first word."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from esper.leyline.errors import UnknownNameError
from esper.scripts.flags import exit_on_user_error, parse_run

CONTROLLERS = ("heuristic", "ppo")
RENAMED = {"rng_seed": "seed", "steps": "max-epochs"}
RENAMED_PPO = {**RENAMED, "iterations": "episodes"}
"""For a policy an episode of training is an iteration: one episode in every environment and one update."""


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of the module."""
    words = list(sys.argv[1:] if args is None else args)
    if not words or words[0] in ("-h", "--help"):
        print(f"usage: python -m esper.scripts.train {{{','.join(CONTROLLERS)}}} [flags]")
        return
    exit_on_user_error(lambda: _train(words[0], words[1:]))


def _train(controller: str, args: Sequence[str]) -> None:
    if controller not in CONTROLLERS:
        raise UnknownNameError("controller", controller, CONTROLLERS)
    if controller == "ppo":
        from esper.scripts.train_command import train_command

        train_command(args, prog="python -m esper.scripts.train ppo", renamed=RENAMED_PPO)
        return
    config = parse_run(
        f"python -m esper.scripts.train {controller}",
        f"Grow a network under the {controller}.",
        args,
        renamed=RENAMED,
        fixed={"controller": controller},
    )
    from esper.scripts.run_command import run

    run(config)


if __name__ == "__main__":
    main()
