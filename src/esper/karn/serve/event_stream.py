"""``GET /events``: tells a browser which runs there are and in which version, as server-sent events.

Every event has all runs, so a connection that was cut off misses nothing: the page compares with what it has.
One comes at the beginning and whenever a run is new, gone or changed, and a comment where nothing did.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Final

from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from esper.karn.serve.folder import RunFolder

SECONDS: Final = 1.0
"""Between two looks."""
HEARTBEAT_CHECKS: Final = 15
"""So many looks without news are followed by a comment, so that a dead connection is noticed."""
RETRY_MS: Final = 2000
"""How long a browser waits until it connects again."""


def events_response(folder: RunFolder, is_ending: Callable[[], bool]) -> StreamingResponse:
    """An answer that ends when the browser goes, or the server."""
    return StreamingResponse(
        run_events(folder, is_ending), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
    )


async def run_events(
    folder: RunFolder, is_ending: Callable[[], bool], seconds: float = SECONDS
) -> AsyncIterator[str]:
    """The events of one connection, as text."""
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
