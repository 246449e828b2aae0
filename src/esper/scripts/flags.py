"""Flags made from the typed configuration; a flag that cannot be read is refused in one sentence."""

from __future__ import annotations

import argparse
import difflib
import types
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

from esper.config import ConfigError, RunConfig, run_config

Flag = tuple[Any, Any, str]
"""Type, default and help of a flag that is no setting of the configuration."""


class UsageError(ConfigError):
    """A word of the command line that cannot be read."""


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

    Only what was spelled out counts as given: the rest is the file's or the default's to say. A setting of
    the wrong type is returned as it was written, for ``checked`` to refuse with whatever else is wrong.
    """
    names, extra = renamed or {}, extra or {}
    parser = _Parser(prog=prog, usage=f"{prog} [flags]", description=description, allow_abbrev=False)
    for name, field in kind.model_fields.items():
        if name not in without:
            _add(
                parser, name, names.get(name, name), field.annotation, field.default, field.description or ""
            )
    for name, (flag_type, default, text) in extra.items():
        _add(parser, name, name, flag_type, default, text)
    parsed, unknown = parser.parse_known_args([_hyphenated(word) for word in args])
    if unknown:
        parser.refuse(unknown[0])
    given, values = {}, {name: default for name, (_, default, _) in extra.items()}
    for name, written in vars(parsed).items():
        if name not in extra:
            given[name] = _typed(kind.model_fields[name].annotation, written)
        else:
            values[name] = _typed(extra[name][0], written)
            if isinstance(values[name], str) and not _is_a(str, extra[name][0]):
                raise UsageError(f"--{name}: expected {_metavar(extra[name][0])}; found {written[:80]!r}")
    return given, values


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.removeprefix('argument ')}; {self.prog} --help lists the flags")

    def refuse(self, word: str) -> NoReturn:
        flag = word.partition("=")[0]
        if not flag.startswith("-"):
            raise UsageError(f"unexpected word '{word[:80]}'; {self.prog} --help lists the flags")
        near = difflib.get_close_matches(flag[:80], self._option_string_actions, n=1)
        hint = f"did you mean {near[0]}?" if near else f"{self.prog} --help lists them"
        raise UsageError(f"unknown flag '{flag[:80]}'; {hint}")


def _add(parser: _Parser, name: str, flag: str, kind: Any, default: Any, text: str) -> None:
    """One flag; what is not given does not appear among the parsed values."""
    shown = "" if default is None or default == () else f" (default: {default})"
    options: dict[str, Any] = {"help": f"{text}{shown}".replace("%", "%%"), "default": argparse.SUPPRESS}
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    else:
        options["metavar"] = _metavar(kind)
        if _is_a(tuple, kind):
            options["nargs"] = "*"
    parser.add_argument(f"--{flag.replace('_', '-')}", dest=name, **options)


def _hyphenated(word: str) -> str:
    """``--rng_seed=1`` is ``--rng-seed=1``."""
    flag, equals, value = word.partition("=")
    return (flag.replace("_", "-") if flag.startswith("--") else flag) + equals + value


def _typed(kind: Any, written: Any) -> Any:
    try:
        return TypeAdapter(kind).validate_python(written)
    except ValidationError:
        return written


def _is_a(wanted: type, kind: Any) -> bool:
    """Whether ``kind`` is ``wanted``, or ``wanted[…]``, or one of these or ``None``."""
    choices = get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    return any(choice is wanted or get_origin(choice) is wanted for choice in choices)


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "{" + ",".join(map(str, get_args(kind))) + "}"
    names = {int: "INT", float: "FLOAT", Path: "PATH"}
    return next((name for wanted, name in names.items() if _is_a(wanted, kind)), "TEXT")
