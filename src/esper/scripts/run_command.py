"""``esper run``: grow a network on a task, show the progress, and print a table of results."""

from collections.abc import Sequence

from esper.run.run_config import RunConfig, checked
from esper.scripts.flags import parse_flags


def run_command(
    args: Sequence[str],
    *,
    prog: str = "esper run",
    renamed: dict[str, str] | None = None,
    controller: str | None = None,
) -> None:
    """Parse the flags of ``esper run``, run the episodes, and print the results.

    Args:
        args: Command-line arguments after the name of the command.
        prog: Name of the command, for usage and error messages.
        renamed: Names of flags that differ from the name of their setting, by setting.
        controller: Name of the only allowed controller; if given, there is no flag ``--controller``.
    """
    fixed = {} if controller is None else {"controller": controller}
    fields = {name: field for name, field in RunConfig.model_fields.items() if name not in fixed}
    config = checked(RunConfig, parse_flags(fields, prog, RunConfig.__doc__, args, renamed) | fixed)
    from esper.scripts.run_results import run

    run(config)
