"""Flags made from the typed configuration; a flag that cannot be read is refused in one sentence."""

import argparse
import difflib
import sys
import types
from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from esper.leyline.errors import EsperError
from esper.run.run_config import Config, ConfigError, Settings, checked
from esper.simic.settings import Hardware


class UsageError(ConfigError):
    """A word of the command line that cannot be read."""


def parse_words(
    kind: type[Config], prog: str, description: str, args: Sequence[str], *, count: int = 1, needed: str = ""
) -> tuple[list[str], Config]:
    """Read the first words, up to ``count``, and flags for ``kind``; ``needed`` refuses fewer words."""
    words = list(takewhile(lambda word: not word.startswith("-"), args[:count]))
    given, _ = parse_flags(kind, prog, description, args[len(words) :])
    if needed and len(words) < count:
        raise EsperError(f"{' '.join(prog.split()[:2])} needs {needed}")
    return words, checked(kind, given)


def parse_flags(
    kind: type[BaseModel],
    prog: str,
    description: str,
    args: Sequence[str],
    *,
    renamed: Mapping[str, str] | None = None,
    without: Collection[str] = (),
    extra: type[BaseModel] = Settings,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of ``kind`` and of ``extra`` that were given as flags; ``as_json`` has the flag --json.

    Only what was spelled out counts as given: the rest is the file's or the default's to say. A setting of
    the wrong type is returned as it was written, for ``checked`` to refuse with whatever else is wrong.
    """
    parser = _Parser(prog=prog, usage=f"{prog} [flags]", description=description, allow_abbrev=False)
    fields = kind.model_fields | extra.model_fields
    for name, field in fields.items():
        if name not in without:
            _add(parser, name, (renamed or {}).get(name, name.removeprefix("as_")), field)
    parsed, unknown = parser.parse_known_args([_hyphenated(word) for word in args])
    if unknown:
        parser.refuse(unknown[0])
    given = {name: _typed(fields[name].annotation, written) for name, written in vars(parsed).items()}
    own, others = ({n: v for n, v in given.items() if n in of.model_fields} for of in (kind, extra))
    return own, others


def say_where(config: Hardware) -> None:
    """Print which environments run on which device, and which kernels, unless all is as ever.

    As ever is the processor, with kernels of our own.
    """
    from esper.kasmina.native import kernels

    if kernels().library is None:
        print(f"esper: convolutions run on kernels that are {kernels().description}", file=sys.stderr)
    if config.devices != Hardware().devices:
        from esper.tolaria.devices import describe_map

        print(f"esper: {describe_map(config.devices, config.environments)}", file=sys.stderr)


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


def _add(parser: _Parser, name: str, flag: str, field: FieldInfo) -> None:
    """One flag; what is not given does not appear among the parsed values."""
    kind = field.annotation
    default = " ".join(field.default) if isinstance(field.default, tuple) else field.default
    shown = "" if default in (None, "") else f" (default: {default})"
    text = f"{field.description}{shown}".replace("%", "%%")
    options: dict[str, Any] = {"help": text, "default": argparse.SUPPRESS}
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
