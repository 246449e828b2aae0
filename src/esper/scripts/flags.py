"""Flags made from the typed configuration, and one way to end on a user's mistake."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any

import tyro

from esper.config import RunConfig, run_config
from esper.leyline.errors import EsperError

USAGE_ERROR = 2
INTERRUPTED = 130


def parse_run(
    prog: str,
    description: str,
    args: Sequence[str],
    *,
    renamed: dict[str, str] | None = None,
    fixed: dict[str, Any] | None = None,
) -> RunConfig:
    """Read flags for ``RunConfig``; ``renamed`` gives fields other flag names, ``fixed`` takes some away.

    Only what differs from its default is handed on, so that the configuration knows what was given.
    """
    fixed = fixed or {}
    flags = _flag_class({"as_json": "json", **(renamed or {})}, fixed)
    parsed = tyro.cli(flags, args=list(args), prog=prog, description=description)
    defaults = {name: field.default for name, field in RunConfig.model_fields.items()}
    given = {name: value for name, value in vars(parsed).items() if value != defaults[name]}
    return run_config(**given, **fixed)


def _flag_class(renamed: dict[str, str], without: Collection[str]) -> type[Any]:
    """A dataclass with one field per setting: tyro shows its help and converts the words."""
    fields: list[tuple[str, Any, Any]] = []
    for name, field in RunConfig.model_fields.items():
        if name in without:
            continue
        flag = tyro.conf.arg(name=renamed.get(name, name), help=field.description or "")
        fields.append((name, Annotated[field.annotation, flag], dataclasses.field(default=field.default)))
    return dataclasses.make_dataclass("RunFlags", fields)


def exit_on_user_error(command: Callable[[], None]) -> None:
    """Run ``command``; a user's mistake ends with its sentence and a non-zero exit, never a traceback."""
    from esper.runner import InterruptedRunError

    try:
        command()
    except InterruptedRunError as error:
        print(f"esper: {error}", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except EsperError as error:
        print(f"esper: {error}", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    except KeyboardInterrupt:
        print("esper: interrupted before the first epoch; nothing was lost", file=sys.stderr)
        sys.exit(INTERRUPTED)
