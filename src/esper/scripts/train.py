"""``python -m esper.scripts.train DECIDER …``: the same run, with the decision maker as first word."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from esper.leyline.errors import UnknownNameError
from esper.scripts.flags import exit_on_user_error, parse_run

DECIDERS = ("heuristic", "ppo")
RENAMED = {"rng_seed": "seed", "steps": "max-epochs"}
RENAMED_PPO = {**RENAMED, "rounds": "episodes"}
"""For a policy an episode of training is a round: one life in every environment and one update."""


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of the module."""
    words = list(sys.argv[1:] if args is None else args)
    if not words or words[0] in ("-h", "--help"):
        print(f"usage: python -m esper.scripts.train {{{','.join(DECIDERS)}}} [flags]")
        return
    exit_on_user_error(lambda: _train(words[0], words[1:]))


def _train(decider: str, args: Sequence[str]) -> None:
    if decider not in DECIDERS:
        raise UnknownNameError("decider", decider, DECIDERS)
    if decider == "ppo":
        from esper.scripts.train_command import train_command

        train_command(args, prog="python -m esper.scripts.train ppo", renamed=RENAMED_PPO)
        return
    config = parse_run(
        f"python -m esper.scripts.train {decider}",
        f"Grow a network under the {decider}.",
        args,
        renamed=RENAMED,
        fixed={"decider": decider},
    )
    from esper.scripts.run_command import run

    run(config)


if __name__ == "__main__":
    main()
