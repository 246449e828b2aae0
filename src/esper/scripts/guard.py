"""Error handling of commands: one sentence on standard error and a non-zero exit code."""

import contextlib
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence

from esper.leyline.errors import EsperError, InterruptedRunError

USAGE_ERROR = 2
INTERNAL_ERROR = 70
"""``EX_SOFTWARE`` of sysexits.h: an error inside Esper."""
INTERRUPTED = 130
HEAD, TAIL = 600, 200
"""Characters kept at the start and the end of a very long error message."""


def run_main(args: Sequence[str] | None, usage: str, command: Callable[[list[str]], None]) -> None:
    """Run ``command`` with the words of the command line, or print its usage.

    Args:
        args: Words of the command line; those of this process if None.
        usage: Text printed without words, and for ``--help`` as the first word.
        command: Function of the words; its errors end the process with one sentence.
    """
    words = list(sys.argv[1:] if args is None else args)
    if not words or words[0] in ("-h", "--help"):
        print(usage)
    else:
        exit_on_error(lambda: command(_checked(words)))


def _checked(words: list[str]) -> list[str]:
    """Return the words of the command line; refuse words with undecodable bytes or zero bytes."""
    for number, word in enumerate(words, start=1):
        if "\0" in word or any("\ud800" <= character <= "\udfff" for character in word):
            raise EsperError(f"word {number} of the command line is not valid UTF-8: {word[:80]!a}")
    return words


def exit_on_error(command: Callable[[], None]) -> None:
    """Run ``command``; after an error, print one sentence and exit with a non-zero code.

    The traceback of an unexpected error is written to a file, which the printed sentence names.
    """
    try:
        command()
    except InterruptedRunError as error:
        _end(str(error), INTERRUPTED)
    except EsperError as error:
        _end(str(error), USAGE_ERROR)
    except BrokenPipeError:  # The reader of standard output, such as head, has closed it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(USAGE_ERROR)
    except KeyboardInterrupt:
        _end("interrupted before the command was done", INTERRUPTED)
    except OSError as error:
        if error.filename is None:
            _end_internally(error)
        _end(f"'{error.filename}' cannot be used: {error.strerror}", USAGE_ERROR)
    except Exception as error:
        _end_internally(error)


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
    """Print an error message as one line, with control characters escaped, and exit."""
    if len(sentence) > HEAD + TAIL:
        sentence = f"{sentence[:HEAD]} … {sentence[-TAIL:]}"
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in sentence)
    print(f"esper: {line}", file=sys.stderr)
    sys.exit(code)
