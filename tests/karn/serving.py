"""Helpers that write generated runs to a folder, and an HTTP client for the server of that folder."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
from msgspec.structs import replace
from starlette.types import Message, Scope

from esper.karn.serve.access_control import Access
from esper.karn.serve.app import create_app
from esper.karn.serve.folder import RunFolder
from esper.leyline.rows import Row
from tests.karn import fake_run, made_run
from tests.karn.page import Node, read_page

LOCAL = Access("127.0.0.1", 8377, token=None)


def write_run(directory: Path, rows: Iterable[Row] | None = None, **columns: Any) -> Path:
    """Write a finished run with the given telemetry rows, by default those of one episode."""
    own = fake_run.episode() if rows is None else rows
    return made_run.write(directory, [fake_run.run_row(**columns), *own])


def training(iterations: int) -> Iterable[Row]:
    """Yield the rows of a policy training with one environment."""
    for number in range(1, iterations + 1):
        for row in fake_run.episode(episode=number - 1):
            yield replace(row, iteration=number)
        yield fake_run.update_row(number)


def lines_of(run: Path) -> Path:
    """Return the path of the JSON Lines file with the telemetry rows of a short run."""
    return run / "telemetry" / "rows-00000.jsonl"


def damage(run: Path) -> Path:
    """Damage a run: append a line that is not a telemetry row to its JSON Lines file."""
    with lines_of(run).open("a") as file:
        file.write("<script>alert(1)</script>\n")
    return run


@dataclass(frozen=True, slots=True)
class Answer:
    """HTTP response of the server under test."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def html(self) -> Node:
        return read_page(self.body.decode())

    @property
    def error(self) -> str:
        """Return the error message in an HTTP error response."""
        if self.headers["content-type"] == "application/json":
            return msgspec.json.decode(self.body)["error"]
        return self.html.one(role="alert").text


def facts(head: Node) -> dict[str, str]:
    """Return the values shown in the header of a run's web page, by label."""
    return {one.attributes["data-fact"]: one.one("b").text for one in head.all(class_="fact")}


class Client:
    """HTTP test client that sends URL paths exactly as given, without normalisation."""

    def __init__(self, folder: Path, access: Access = LOCAL) -> None:
        self.app = create_app(RunFolder(folder, clock=lambda: self._now), access)
        self.access = access
        self._now = 0.0
        self._ids: dict[str, str] = {}

    def ask(self, target: str, method: str = "GET", headers: Mapping[str, str] | None = None) -> Answer:
        # Each request advances the fake clock by 1000 seconds, so that the server lists the folder again.
        self._now += 1000
        path, _, query = target.partition("?")
        given = {"host": f"{self.access.host}:{self.access.port}", **(headers or {})}
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "client": ("127.0.0.1", 50000),
            "server": ("127.0.0.1", 8377),
        }
        sent: list[Message] = []

        messages = iter([{"type": "http.request", "body": b"", "more_body": False}])

        async def receive() -> Message:
            for message in messages:
                return message
            # After its request, the fake HTTP client stays connected and sends nothing more.
            await asyncio.Event().wait()
            raise AssertionError("this event is never set")

        async def send(message: Message) -> None:
            sent.append(message)

        asyncio.run(self.app(scope, receive, send))
        start = next(message for message in sent if message["type"] == "http.response.start")
        content = b"".join(message.get("body", b"") for message in sent)
        answered = {name.decode().lower(): value.decode() for name, value in start["headers"]}
        return Answer(start["status"], answered, content)

    def rows(self, *, patiently: bool = True) -> dict[str, Node]:
        """Return the table rows of the served list of runs, by run name."""
        while patiently and b"pending" in self.ask("/rows").body:
            pass
        return {row.attributes["data-name"]: row for row in self.ask("/rows").html.all("tr")}

    def id_of(self, name: str) -> str:
        if name not in self._ids:
            self._ids |= {name: row.attributes["data-run"] for name, row in self.rows().items()}
        return self._ids[name]

    def part(self, name: str, key: str) -> Answer:
        return self.ask(f"/runs/{self.id_of(name)}/{key}")
