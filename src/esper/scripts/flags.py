"""Flags made from the typed configuration, and one way to end on a user's mistake."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any

import tyro
from pydantic import BaseModel

from esper.config import RunConfig, run_config
from esper.leyline.errors import EsperError, InterruptedRunError

USAGE_ERROR = 2
INTERRUPTED = 130


Flag = tuple[Any, Any, str]
"""Type, default and help of a flag that is no setting of the configuration."""


def parse_run(
    prog: str,
    description: str,
    args: Sequence[str],
    *,
    renamed: dict[str, str] | None = None,
    fixed: dict[str, Any] | None = None,
) -> RunConfig:
    """Read flags for ``RunConfig``; ``renamed`` gives fields other flag names, ``fixed`` takes some away."""
    fixed = fixed or {}
    names = {"as_json": "json", **(renamed or {})}
    given, _ = parse_flags(RunConfig, prog, description, args, renamed=names, without=fixed)
    return run_config(**given, **fixed)


def parse_flags(
    kind: type[BaseModel],
    prog: str,
    description: str,
    args: Sequence[str],
    *,
    renamed: Mapping[str, str] | None = None,
    without: Collection[str] = (),
    extra: Mapping[str, Flag] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of ``kind`` that were given as flags, and the values of the ``extra`` flags.

    Only what was spelled out counts as given: the rest is the file's or the default's to say.
    """
    names, extra = renamed or {}, extra or {}
    fields: list[tuple[str, Any, Any]] = []
    for name, field in kind.model_fields.items():
        if name not in without:
            flag = tyro.conf.arg(name=names.get(name, name), help=field.description or "")
            fields.append((name, Annotated[field.annotation, flag], dataclasses.field(default=field.default)))
    for name, (flag_type, default, text) in extra.items():
        fields.append(
            (name, Annotated[flag_type, tyro.conf.arg(help=text)], dataclasses.field(default=default))
        )
    flags = dataclasses.make_dataclass("Flags", fields)
    parsed = vars(tyro.cli(flags, args=list(args), prog=prog, description=description))
    spelled = _spelled(args)
    given = {n: v for n, v in parsed.items() if n not in extra and spelled & _spellings(names.get(n, n))}
    return given, {name: parsed[name] for name in extra}


def _spelled(args: Sequence[str]) -> set[str]:
    """The names of the flags in ``args``."""
    flags = (word.partition("=")[0] for word in args if word.startswith("--"))
    return {flag.removeprefix("--").replace("-", "_") for flag in flags}


def _spellings(name: str) -> set[str]:
    """How a flag may be written: switches can also be turned off."""
    return {name.replace("-", "_"), "no_" + name.replace("-", "_")}


def exit_on_user_error(command: Callable[[], None]) -> None:
    """Run ``command``; a user's mistake ends with its sentence and a non-zero exit, never a traceback."""
    try:
        command()
    except InterruptedRunError as error:
        print(f"esper: {error}", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except EsperError as error:
        print(f"esper: {error}", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(USAGE_ERROR)
    except KeyboardInterrupt:
        print("esper: interrupted before the command was done", file=sys.stderr)
        sys.exit(INTERRUPTED)
