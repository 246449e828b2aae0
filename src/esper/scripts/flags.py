"""Command-line flags, generated from the fields of a configuration class."""

import argparse
import difflib
import types
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from esper.leyline import EsperError, notify
from esper.run.run_config import Config, ConfigError, checked
from esper.simic.config import Hardware


def parse_words(
    kind: type[Config], prog: str, args: Sequence[str], *, count: int = 1, needed: str = ""
) -> tuple[list[str], Config]:
    """Parse the positional arguments and flags of a command.

    Args:
        kind: Configuration class whose fields are the flags; its docstring is printed by ``--help``.
        prog: Usage line of the command, such as ``esper eval CHECKPOINT``.
        args: Command-line arguments after the name of the command.
        count: Largest number of positional arguments.
        needed: Description of the positional arguments if they are required, for the error message.

    Returns:
        The positional arguments, and the configuration made from the flags.

    Raises:
        EsperError: A required positional argument is missing, or a flag or setting is invalid.
    """
    words = list(takewhile(lambda word: not word.startswith("-"), args[:count]))
    given = parse_flags(kind.model_fields, prog, kind.__doc__, args[len(words) :])
    if needed and len(words) < count:
        raise EsperError(f"{' '.join(prog.split()[:2])} needs {needed}")
    return words, checked(kind, given)


def parse_flags(
    fields: Mapping[str, FieldInfo],
    prog: str,
    description: str | None,
    args: Sequence[str],
    renamed: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Parse flags into settings; the field ``as_json`` has the flag ``--json``.

    Only settings whose flags occur in ``args`` are returned, so that files and defaults can supply the
    others. A flag's value of the wrong type is returned as text, so that ``checked`` can report all errors at
    once.

    Args:
        fields: Fields of a configuration class, by name; every field is a flag.
        prog: Name of the command, for usage and error messages.
        description: Text that ``--help`` prints before the flags.
        args: Command-line arguments after the name of the command.
        renamed: Names of flags that differ from the name of their field, by field.

    Returns:
        The settings that were given as flags, by name of the field.

    Raises:
        ConfigError: A flag is unknown, or there is an unexpected positional argument.
    """
    parser = _Parser(prog=prog, usage=f"{prog} [flags]", description=description, allow_abbrev=False)
    for name, field in fields.items():
        _add(parser, name, (renamed or {}).get(name, name.removeprefix("as_")), field)
    parsed, unknown = parser.parse_known_args([_hyphenated(word) for word in args])
    if unknown:
        parser.refuse(unknown[0])
    return {name: _typed(fields[name].annotation, written) for name, written in vars(parsed).items()}


def say_where(config: Hardware) -> None:
    """Print the devices of all environments, unless all environments run on the CPU."""
    if config.devices != Hardware().devices:
        from esper.tolaria.devices import describe_map

        notify(describe_map(config.devices, config.environments))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')}; {self.prog} --help lists the flags")

    def refuse(self, word: str) -> NoReturn:
        flag = word.partition("=")[0]
        if not flag.startswith("-"):
            raise ConfigError(f"unexpected word '{word[:80]}'; {self.prog} --help lists the flags")
        near = difflib.get_close_matches(flag[:80], self._option_string_actions, n=1)
        hint = f"did you mean {near[0]}?" if near else f"{self.prog} --help lists them"
        raise ConfigError(f"unknown flag '{flag[:80]}'; {hint}")


def _add(parser: _Parser, name: str, flag: str, field: FieldInfo) -> None:
    """Add one flag to the parser; a flag that is not given has no entry in the parsed values."""
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
    """Replace underscores in the name of a flag by hyphens: ``--rng_seed=1`` becomes ``--rng-seed=1``."""
    flag, equals, value = word.partition("=")
    return (flag.replace("_", "-") if flag.startswith("--") else flag) + equals + value


def _typed(kind: Any, written: Any) -> Any:
    try:
        return TypeAdapter(kind).validate_python(written)
    except ValidationError:
        return written


def _is_a(wanted: type, kind: Any) -> bool:
    """Return whether the annotation ``kind`` is ``wanted``, ``wanted[…]``, or a union that includes one of
    them."""
    choices = get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    return any(choice is wanted or get_origin(choice) is wanted for choice in choices)


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "{" + ",".join(map(str, get_args(kind))) + "}"
    names = {int: "INT", float: "FLOAT", Path: "PATH"}
    return next((name for wanted, name in names.items() if _is_a(wanted, kind)), "TEXT")
