"""Errors a user can act on: every message says what was found, what is allowed and what to do."""

import difflib
import inspect
import warnings
from collections.abc import Iterable
from typing import Final

import msgspec

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding a damaged row can raise: no JSON of its type, no text, nested too deeply."""


class EsperError(Exception):
    """Base of all errors that are a user's to solve; shown as one sentence, without a traceback."""


class UnknownNameError(EsperError):
    """A name that is not among the allowed ones."""

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
    """A slot that the model does not have, or that cannot be used as one."""


class HostError(EsperError):
    """A host that cannot be built, saved or grown, or a submodule that cannot carry a slot."""


class BlueprintError(EsperError):
    """A blueprint that cannot be registered, or does not fit the place it was germinated into."""


class RunDirectoryError(EsperError):
    """A run directory that exists already or cannot be written."""


class InterruptedRunError(EsperError):
    """The user stopped a run; what was finished is on disk."""


class DataError(EsperError):
    """A data set that is missing or malformed, or a split that was read out of turn."""


class DivergedError(EsperError):
    """The host itself became non-finite and no live seed can be blamed."""


class InvalidActionError(EsperError):
    """An action array that no controller may produce (wrong shape, index out of range)."""


class GrowthWarning(UserWarning):
    """Something that the user of a growing network should look at; training goes on."""

    @classmethod
    def issue(cls, sentence: str) -> None:
        """Warn at the line outside of Esper that led here, however deep it is called."""
        frame, level = inspect.currentframe(), 1
        while frame is not None and str(frame.f_globals.get("__name__")).startswith("esper."):
            frame, level = frame.f_back, level + 1
        warnings.warn(sentence, cls, stacklevel=level)
