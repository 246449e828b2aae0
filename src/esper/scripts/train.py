"""``python -m esper.scripts.train CONTROLLER …``: runs ``esper run`` or ``esper train`` with other flag
names.

The renamed flags are ``--seed`` (rng seed) and ``--max-epochs`` (steps of an episode).
"""

import os
from collections.abc import Sequence

from esper.leyline import UnknownNameError
from esper.scripts.guard import run_main
from esper.scripts.parent_process import PARENT_VARIABLE, end_with_parent

CONTROLLERS = ("heuristic", "ppo")
RENAMED = {"rng_seed": "seed", "steps": "max-epochs"}


def main(args: Sequence[str] | None = None) -> None:
    run_main(args, f"usage: python -m esper.scripts.train {{{','.join(CONTROLLERS)}}} [flags]", _train)


def _train(words: Sequence[str]) -> None:
    controller, *args = words
    if controller not in CONTROLLERS:
        raise UnknownNameError("controller", controller, CONTROLLERS)
    prog = f"python -m esper.scripts.train {controller}"
    if controller == "ppo":
        from esper.scripts.train_command import train_command

        train_command(args, prog=prog, renamed=RENAMED)
    else:
        from esper.scripts.run_command import run_command

        run_command(args, prog=prog, renamed=RENAMED, controller=controller)


if __name__ == "__main__":
    # A worker process must end with its parent process, also while it imports torch, which takes seconds.
    if PARENT_VARIABLE in os.environ:
        end_with_parent(int(os.environ[PARENT_VARIABLE]))
    main()
