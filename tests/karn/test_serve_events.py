import asyncio
import itertools
import json
import shutil
from pathlib import Path

from esper.karn.serve.events import HEARTBEAT_LOOKS, changes, news
from esper.karn.serve.folder import RunFolder
from tests.karn.serving import lines_of, write_run

QUIET = ": nothing new\n\n"


def folder_of(path: Path) -> RunFolder:
    """A folder that is looked at whenever it is asked, each time in an instant."""
    ticks = itertools.count()
    return RunFolder(path, clock=lambda: 1000.0 * (next(ticks) // 2))


async def listen(path: Path, *deeds) -> list[str]:
    """What a browser hears at first, and after each deed."""
    stream = news(folder_of(path), lambda: False, seconds=0.001)
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


def test_a_connection_begins_with_all_runs_and_goes_on_with_what_changed(tmp_path):
    one, _ = write_run(tmp_path / "one"), write_run(tmp_path / "two")

    first, second, third = asyncio.run(
        listen(
            tmp_path,
            lambda: add_row(one),
            lambda: write_run(tmp_path / "three"),
        )
    )

    ids = {run.name: run.id for run in folder_of(tmp_path).runs().values()}
    assert first.startswith("retry: 2000\nevent: runs\ndata: ")
    assert set(content(first)) == {ids["one"], ids["two"]}
    assert second.startswith("event: changed\ndata: ")
    assert set(content(second)) == {ids["one"]}
    assert content(second)[ids["one"]] != content(first)[ids["one"]]
    assert set(content(third)) == {ids["three"]}
    assert all(event.endswith("\n\n") for event in (first, second, third))


def test_a_run_that_is_gone_is_told(tmp_path):
    one = write_run(tmp_path / "one")

    first, second = asyncio.run(listen(tmp_path, lambda: shutil.rmtree(one)))

    assert content(second) == dict.fromkeys(content(first), None)


def test_where_nothing_happens_a_comment_keeps_the_connection_alive(tmp_path):
    folder = folder_of(tmp_path)
    looks = 0

    def count_looks() -> bool:
        nonlocal looks
        looks += 1
        return False

    async def hear() -> list[str]:
        stream = news(folder, count_looks, seconds=0.0)
        return [await anext(stream) for _ in range(3)]

    assert asyncio.run(hear())[1:] == [QUIET, QUIET]
    assert looks == 2 * HEARTBEAT_LOOKS


def test_a_server_that_ends_lets_its_listeners_go(tmp_path):
    async def hear() -> list[str]:
        return [event async for event in news(folder_of(tmp_path), lambda: True, seconds=0.0)]

    assert len(asyncio.run(hear())) == 1


def test_changes_are_new_versions_new_runs_and_runs_that_are_gone():
    assert changes({"a": "1", "b": "1", "c": "1"}, {"a": "1", "b": "2", "d": "1"}) == {
        "b": "2",
        "c": None,
        "d": "1",
    }
