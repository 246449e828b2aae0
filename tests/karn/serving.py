"""A folder of made-up runs and a client of the page over it, for the tests of the server."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
from msgspec.structs import replace
from starlette.types import Message, Scope

from esper.karn.serve.app import create_app
from esper.karn.serve.folder import RunFolder
from esper.karn.serve.safety import Access
from esper.leyline.rows import Row
from tests.karn import fake_run, made_run
from tests.karn.page import Node, read_page

LOCAL = Access("127.0.0.1", 8377, token=None)


def write_run(directory: Path, rows: Iterable[Row] | None = None, **columns: Any) -> Path:
    """A run that is not written any more; of one episode unless other rows are given."""
    own = fake_run.episode() if rows is None else rows
    return made_run.write(directory, [fake_run.run_row(**columns), *own])


def training(iterations: int) -> Iterable[Row]:
    """The rows of a training with one environment."""
    for number in range(1, iterations + 1):
        for row in fake_run.episode(episode=number - 1):
            yield replace(row, iteration=number)
        yield fake_run.update_row(number)


def lines_of(run: Path) -> Path:
    """The file with the rows of a short run."""
    return run / "telemetry" / "rows-00000.jsonl"


def damage(run: Path) -> Path:
    """A run that has a line which is no row."""
    with lines_of(run).open("a") as file:
        file.write("<script>alert(1)</script>\n")
    return run


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def html(self) -> Node:
        return read_page(self.body.decode())

    @property
    def error(self) -> str:
        """The sentence of a refusal."""
        if self.headers["content-type"] == "application/json":
            return msgspec.json.decode(self.body)["error"]
        return self.html.one(role="alert").text


def facts(head: Node) -> dict[str, str]:
    """What stands on top of a run's page, by its name."""
    return {one.attributes["data-fact"]: one.one("b").text for one in head.all(class_="fact")}


class Client:
    """Asks the page as a browser would, but with the path exactly as it is given."""

    def __init__(self, folder: Path, access: Access = LOCAL) -> None:
        self.app = create_app(RunFolder(folder, clock=lambda: self._now), access)
        self.access = access
        self._now = 0.0
        self._ids: dict[str, str] = {}

    def ask(self, target: str, method: str = "GET", headers: Mapping[str, str] | None = None) -> Answer:
        self._now += 1000  # seconds, so that the folder is looked at again
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

        said = iter([{"type": "http.request", "body": b"", "more_body": False}])

        async def receive() -> Message:
            for message in said:
                return message
            await asyncio.Event().wait()  # the browser stays, and says nothing more
            raise AssertionError("nobody sets this event")

        async def send(message: Message) -> None:
            sent.append(message)

        asyncio.run(self.app(scope, receive, send))
        start = next(message for message in sent if message["type"] == "http.response.start")
        content = b"".join(message.get("body", b"") for message in sent)
        answered = {name.decode().lower(): value.decode() for name, value in start["headers"]}
        return Answer(start["status"], answered, content)

    def rows(self, *, patiently: bool = True) -> dict[str, Node]:
        """The lines of the list, by the names of their runs."""
        while patiently and b"pending" in self.ask("/rows").body:
            pass
        return {row.attributes["data-name"]: row for row in self.ask("/rows").html.all("tr")}

    def id_of(self, name: str) -> str:
        if name not in self._ids:
            self._ids |= {name: row.attributes["data-run"] for name, row in self.rows().items()}
        return self._ids[name]

    def part(self, name: str, key: str) -> Answer:
        return self.ask(f"/runs/{self.id_of(name)}/{key}")
