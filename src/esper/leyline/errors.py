"""Errors that a user can act on: each message names the value found, the allowed values and the remedy; and
escapes for text that is printed on a terminal."""

import difflib
import inspect
import sys
import warnings
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import msgspec

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions that decoding a damaged row can raise: invalid JSON or type, invalid UTF-8, nesting too deep."""


class EsperError(Exception):
    """Base class of errors that the user can solve; the CLI prints the message without a traceback."""


class UnknownNameError(EsperError):
    """Error: a name is not among the allowed names; the message suggests close matches.

    Args:
        kind: Kind of thing that the name should denote, such as "blueprint" or "task", for the error message.
        found: Unknown name that was given.
        allowed: Names that are allowed, for the error message.
        hint: Sentence to add at the end of the error message.
    """

    def __init__(self, kind: str, found: str, allowed: Iterable[str], hint: str = "") -> None:
        names = list(allowed)
        found = found[:80]
        near = difflib.get_close_matches(found, names, n=3, cutoff=0.5)
        sentence = f"unknown {kind} '{found}'"
        sentence += f"; did you mean {' or '.join(near)}?" if near else "."
        sentence += f" Allowed: {', '.join(names) or 'none'}."
        if hint:
            sentence += f" {hint}"
        super().__init__(sentence)


class SlotError(EsperError):
    """Error: a slot does not exist in the model, or a slot id is invalid."""


class HostError(EsperError):
    """Error: a host cannot be built, saved or grown, or a submodule cannot have a slot."""


class BlueprintError(EsperError):
    """Error: a blueprint cannot be registered, or does not fit the slot in which it is to be planted."""


class IncompatibleSeedError(BlueprintError):
    """Error: a seed with this blend style, or together with the seeds of other slots, cannot be part of the
    network."""


class RunDirectoryError(EsperError):
    """Error: a run directory exists already or cannot be written."""


class InterruptedRunError(EsperError):
    """Error: the user stopped a run; rows and checkpoints that were complete before the stop are on disk."""


class DataError(EsperError):
    """Error: a data set is missing or malformed, or the test split was read more than once."""


class DivergedError(EsperError):
    """Error: the host became non-finite, and no live seed could be the cause."""


class InvalidActionError(EsperError):
    """Error: an action array has the wrong shape or an index out of range."""


class GrowthWarning(UserWarning):
    """Warning about a growing network; training continues."""

    @classmethod
    def issue(cls, sentence: str) -> None:
        """Issue the warning, with the nearest caller outside of Esper as its location."""
        frame, level = inspect.currentframe(), 1
        while frame is not None and str(frame.f_globals.get("__name__")).startswith("esper."):
            frame, level = frame.f_back, level + 1
        warnings.warn(sentence, cls, stacklevel=level)


def notify(sentence: str) -> None:
    """Print a sentence on standard error; a standard error that cannot be written is ignored."""
    with suppress(OSError):
        sys.stderr.write(f"esper: {sentence}\n")
        sys.stderr.flush()


# --- text of unknown origin ---------------------------------------------------------------------------------


def printable(text: str) -> str:
    r"""Return the text with control and other invisible characters escaped.

    Names of runs, paths and values of SQL queries can contain escape sequences that move the cursor, recolour
    the terminal or reverse the direction of text, so every function that prints them calls ``printable``.

    Example:
        >>> print(printable("run\x1b[2J"))
        run\x1b[2J
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
