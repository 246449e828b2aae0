"""``GET /events``: server-sent events with the version of every run.

Every event contains all runs, so an interrupted connection loses nothing. An event is sent at the start and
whenever a run appears, changes or disappears; otherwise a comment is sent now and then.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Final

from starlette.concurrency import run_in_threadpool

from esper.karn.serve.folder import RunFolder

SECONDS: Final = 1.0
"""Seconds between two checks of the folder."""
HEARTBEAT_CHECKS: Final = 15
"""Number of checks without changes after which a comment is sent, so that a dead connection is detected."""
RETRY_MS: Final = 2000
"""Milliseconds after which a browser reconnects."""


async def run_events(
    folder: RunFolder, is_ending: Callable[[], bool], seconds: float = SECONDS
) -> AsyncIterator[str]:
    """Yield the events of one connection as text."""
    yield f"retry: {RETRY_MS}\n"
    known, quiet = None, 0
    while not is_ending():
        runs = await run_in_threadpool(folder.runs)
        found = {id: run.version for id, run in runs.items()}
        quiet = quiet + 1 if found == known else 0
        if not quiet:
            yield f"event: runs\ndata: {json.dumps(found)}\n\n"
        elif quiet % HEARTBEAT_CHECKS == 0:
            yield ": nothing new\n\n"
        known = found
        await asyncio.sleep(seconds)
