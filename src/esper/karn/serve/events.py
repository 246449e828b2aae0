"""``GET /events``: tells a browser which runs have new rows, as server-sent events.

Every connection begins with all runs and their versions, so one that was cut off misses nothing: the page
compares with what it has. After that come only the runs that changed, and a comment where nothing did.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final

from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from esper.karn.serve.folder import RunFolder

SECONDS: Final = 1.0
"""Between two looks."""
HEARTBEAT_LOOKS: Final = 15
"""So many looks without news are followed by a comment, so that a dead connection is noticed."""
RETRY_MS: Final = 2000
"""How long a browser waits until it connects again."""

Versions = Mapping[str, str | None]
"""Version by run id; None: the run is gone."""


def events_response(folder: RunFolder, is_ending: Callable[[], bool]) -> StreamingResponse:
    """An answer that ends when the browser goes, or the server."""
    return StreamingResponse(
        news(folder, is_ending), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
    )


async def news(
    folder: RunFolder, is_ending: Callable[[], bool], seconds: float = SECONDS
) -> AsyncIterator[str]:
    """The events of one connection, as text."""
    known = await _versions(folder)
    yield f"retry: {RETRY_MS}\n" + _event("runs", known)
    quiet = 0
    while not is_ending():
        await asyncio.sleep(seconds)
        found = await _versions(folder)
        changed = changes(known, found)
        known = found
        quiet = 0 if changed else quiet + 1
        if changed:
            yield _event("changed", changed)
        elif quiet % HEARTBEAT_LOOKS == 0:
            yield ": nothing new\n\n"


def changes(before: Versions, after: Versions) -> dict[str, str | None]:
    """The versions that are new, and None for runs that are gone."""
    gone: dict[str, str | None] = {id: None for id in before if id not in after}
    return gone | {id: version for id, version in after.items() if before.get(id) != version}


async def _versions(folder: RunFolder) -> dict[str, str]:
    found = await run_in_threadpool(folder.runs)
    return {id: run.version for id, run in found.items()}


def _event(kind: str, versions: Versions) -> str:
    return f"event: {kind}\ndata: {json.dumps(versions)}\n\n"
