"""Queries of strangers, each in a process of its own that may take so much and not more.

``ask`` starts the process and waits; run as a program, this module is the process: request in, reply out.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec

from esper.karn.answer import Answer, Limits, answer
from esper.karn.tables import QueryError
from esper.leyline.errors import EsperError

START_SECONDS: Final = 30.0
"""Until a busy machine has started the process."""


class Request(msgspec.Struct):
    """What is asked."""

    run_dir: str
    query: str
    limits: Limits


class Reply(msgspec.Struct):
    """The answer, or why there is none."""

    answer: Answer | None = None
    error: str | None = None


def ask(run_dir: Path, query: str, limits: Limits) -> Answer:
    """The answer to a query that may be anything; raises ``QueryError`` where there is none."""
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-m", __name__],
            input=msgspec.json.encode(Request(str(run_dir.resolve()), query, limits)),
            capture_output=True,
            timeout=limits.seconds + START_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise QueryError(limits.too_slow) from None
    if process.returncode < 0:  # allocation failed where nobody catches it
        raise QueryError(limits.too_large)
    if process.returncode > 0:
        raise RuntimeError(f"the process of a query failed:\n{process.stderr.decode(errors='replace')}")
    reply = msgspec.json.decode(process.stdout, type=Reply)
    if reply.answer is None:
        raise QueryError(reply.error)
    return reply.answer


def main() -> None:
    """Answer the one request on standard input."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # no file can be written
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def give_up() -> None:
        _send(Reply(error=request.limits.too_slow))
        os._exit(0)

    try:
        _send(Reply(answer=answer(Path(request.run_dir), request.query, request.limits, give_up)))
    except EsperError as error:
        _send(Reply(error=str(error)))


def _send(reply: Reply) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(reply))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
