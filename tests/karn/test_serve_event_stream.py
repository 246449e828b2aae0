import asyncio
import itertools
import json
import shutil
from pathlib import Path

from esper.karn.serve.app import HEARTBEAT_CHECKS, RETRY_MS, run_events
from esper.karn.serve.folder import RunFolder
from tests.karn.serving import lines_of, write_run

QUIET = ": nothing new\n\n"


def folder_of(path: Path) -> RunFolder:
    """Return a ``RunFolder`` whose fake clock advances so fast that every call lists the folder."""
    ticks = itertools.count()
    return RunFolder(path, clock=lambda: 1000.0 * (next(ticks) // 2))


async def listen(path: Path, *deeds) -> list[str]:
    """Return the first server-sent event of a connection; then call each function of ``deeds`` and return the
    next event after each call.
    """
    stream = run_events(folder_of(path), lambda: False, seconds=0.001)
    assert await anext(stream) == f"retry: {RETRY_MS}\n"
    heard = [await anext(stream)]
    for deed in deeds:
        deed()
        heard.append(await anext(stream))
    await stream.aclose()
    return heard


def content(event: str) -> dict[str, str | None]:
    return json.loads(event.partition("data: ")[2])


def add_row(run: Path) -> None:
    with lines_of(run).open("a") as file:
        file.write("{}\n")


def test_server_sends_the_versions_of_all_runs_when_a_run_appears_changes_or_disappears(tmp_path):
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two")
    ids = {run.name: run.id for run in folder_of(tmp_path).runs().values()}
    deeds = (lambda: add_row(one), lambda: write_run(tmp_path / "three"), lambda: shutil.rmtree(two))

    events = asyncio.run(listen(tmp_path, *deeds))

    assert all(event.startswith("event: runs\ndata: ") and event.endswith("\n\n") for event in events)
    first, changed, grown, gone = map(content, events)
    assert set(first) == set(changed) == {ids["one"], ids["two"]}
    assert (first[ids["one"]] != changed[ids["one"]], first[ids["two"]]) == (True, changed[ids["two"]])
    (new,) = set(grown) - set(changed)
    assert set(gone) == {ids["one"], new}


def test_server_sends_a_comment_to_keep_an_idle_event_stream_open(tmp_path):
    folder = folder_of(tmp_path)
    looks = 0

    def count_looks() -> bool:
        nonlocal looks
        looks += 1
        return False

    async def hear() -> list[str]:
        stream = run_events(folder, count_looks, seconds=0.0)
        return [await anext(stream) for _ in range(4)]

    assert asyncio.run(hear())[2:] == [QUIET, QUIET]
    assert looks == 1 + 2 * HEARTBEAT_CHECKS


def test_event_stream_ends_when_the_server_stops(tmp_path):
    async def hear() -> list[str]:
        return [event async for event in run_events(folder_of(tmp_path), lambda: True, seconds=0.0)]

    assert len(asyncio.run(hear())) == 1
