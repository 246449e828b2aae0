"""Errors that a user can act on: each message names the value found, the allowed values and the remedy."""

import difflib
import inspect
import warnings
from collections.abc import Iterable
from typing import Final

import msgspec

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions of decoding a damaged row: invalid JSON or type, invalid UTF-8, nesting too deep."""


class EsperError(Exception):
    """Base class of errors that the user can solve; the CLI prints the message without a traceback."""


class UnknownNameError(EsperError):
    """A name is not among the allowed names; the message suggests close matches.

    Args:
        kind: Kind of name in the error message: "blueprint", "task" ...
        found: Unknown name that was given.
        allowed: Names that exist.
        hint: Sentence added at the end of the error message.
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
    """A slot does not exist in the model, or a slot id is invalid."""


class HostError(EsperError):
    """A host cannot be built, saved or grown, or a submodule cannot have a slot."""


class BlueprintError(EsperError):
    """A blueprint cannot be registered, or does not fit the slot it was germinated into."""


class RunDirectoryError(EsperError):
    """A run directory exists already or cannot be written."""


class InterruptedRunError(EsperError):
    """The user stopped a run; the rows and checkpoints completed so far are on disk."""


class DataError(EsperError):
    """A data set is missing or malformed, or the test split was read more than once."""


class DivergedError(EsperError):
    """The host became non-finite without a live seed that could be the cause."""


class InvalidActionError(EsperError):
    """An action array has the wrong shape or an index out of range."""


class GrowthWarning(UserWarning):
    """Warning about a growing network; training continues."""

    @classmethod
    def issue(cls, sentence: str) -> None:
        """Issue the warning with the location of the nearest caller outside of esper."""
        frame, level = inspect.currentframe(), 1
        while frame is not None and str(frame.f_globals.get("__name__")).startswith("esper."):
            frame, level = frame.f_back, level + 1
        warnings.warn(sentence, cls, stacklevel=level)
