"""Error handling of commands: an error prints one sentence on standard error and exits with a non-zero
code."""

import contextlib
import errno
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from typing import TextIO

from esper.leyline import EsperError, InterruptedRunError, notify, printable

USAGE_ERROR = 2
INTERNAL_ERROR = 70
"""Exit code ``EX_SOFTWARE`` of sysexits.h, for an error inside Esper."""
INTERRUPTED = 130
OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Error numbers of writing to standard output; errors of files have a file name."""
HEAD, TAIL = 600, 200
"""Numbers of characters kept at the start and at the end of a very long error message."""


def run_main(args: Sequence[str] | None, usage: str, command: Callable[[list[str]], None]) -> None:
    """Run ``command`` with the arguments of the command line, or print the usage text.

    Args:
        args: Command-line arguments; those of this process if None.
        usage: Text that is printed if there are no arguments, or if ``--help`` is the first argument.
        command: Function that takes the arguments; its errors are printed as one sentence and end the
            process.
    """
    words = list(sys.argv[1:] if args is None else args)
    if not words or words[0] in ("-h", "--help"):
        exit_on_error(lambda: print(usage))
    else:
        exit_on_error(lambda: command(_checked(words)))


def _checked(words: list[str]) -> list[str]:
    """Return the command-line arguments; raise an error for arguments with undecodable bytes or zero
    bytes."""
    for number, word in enumerate(words, start=1):
        if "\0" in word or any("\ud800" <= character <= "\udfff" for character in word):
            raise EsperError(f"word {number} of the command line is not valid UTF-8: {word[:80]!a}")
    return words


def exit_on_error(command: Callable[[], None]) -> None:
    """Run ``command``; after an error, print one sentence and exit with a non-zero code.

    The traceback of an unexpected error is written to a file whose path is in the printed sentence.
    """
    try:
        _run(command)
    except EsperError as error:
        _end(str(error), INTERRUPTED if isinstance(error, InterruptedRunError) else USAGE_ERROR)
    except BrokenPipeError:  # The program that reads the output, such as head, has ended.
        _drop(sys.stdout)
        sys.exit(USAGE_ERROR)
    except KeyboardInterrupt:
        _end("interrupted before the command was done", INTERRUPTED)
    except OSError as error:
        if error.filename is None and error.errno in OUTPUT_ERRORS:
            _end(
                f"the output cannot be written: {error.strerror}; make room, and run the command again",
                USAGE_ERROR,
            )
        if error.filename is None:
            _end_internally(error)
        _end(f"'{error.filename}' cannot be used: {error.strerror}", USAGE_ERROR)
    except Exception as error:
        # DuckDB raises this error if Ctrl-C is pressed during a query.
        if isinstance(error, RuntimeError) and str(error) == "Query interrupted":
            _end("interrupted before the command was done", INTERRUPTED)
        _end_internally(error)


def _run(command: Callable[[], None]) -> None:
    """Run ``command`` and write what it has printed; ``OSError`` is raised if that is not possible."""
    try:
        command()
    except SystemExit:
        _flush(sys.stdout)
        raise
    _flush(sys.stdout)


def _flush(stream: TextIO | None) -> None:
    if stream is not None:  # Python sets a stream to None that was closed at its start.
        stream.flush()


def _drop(stream: TextIO) -> None:
    """Redirect a stream to nowhere, because Python would write the rest of its text when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _end_internally(error: Exception) -> None:
    reason = str(error).partition("\n")[0]
    sentence = f"{type(error).__name__}{f': {reason}' if reason else ''}"
    with contextlib.suppress(OSError):  # A full disk must not hide the original error.
        number, path = tempfile.mkstemp(prefix="esper-", suffix=".log")
        with os.fdopen(number, "w", errors="backslashreplace") as file:
            traceback.print_exception(error, file=file)
        sentence = f"{sentence}; this was not foreseen, and the traceback is in {path}"
    _end(sentence, INTERNAL_ERROR)


def _end(sentence: str, code: int) -> None:
    """Print an error message as one line, with control characters escaped, and exit with ``code``."""
    if len(sentence) > HEAD + TAIL:
        sentence = f"{sentence[:HEAD]} … {sentence[-TAIL:]}"
    notify(printable(sentence))
    for stream in (sys.stdout, sys.stderr):
        try:
            _flush(stream)
        except OSError:
            _drop(stream)
    sys.exit(code)
