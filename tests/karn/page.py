"""Parser that turns an HTML page into a tree of elements, for assertions in tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "img", "link", "input"}


@dataclass
class Node:
    """One HTML element with its attributes and children."""

    name: str
    attributes: dict[str, str]
    children: list[Node | str] = field(default_factory=list)

    def all(self, name: str | None = None, **attributes: str) -> Iterator[Node]:
        """Return the descendants of an HTML element in document order; ``class_`` filters by CSS class."""
        for child in self.children:
            if isinstance(child, Node):
                if child.name == (name or child.name) and child._has(attributes):
                    yield child
                yield from child.all(name, **attributes)

    def _has(self, attributes: dict[str, str]) -> bool:
        for key, value in attributes.items():
            found = self.attributes.get(key.rstrip("_"), "")
            if value not in (found.split() if key == "class_" else [found]):
                return False
        return True

    def one(self, name: str | None = None, **attributes: str) -> Node:
        (found,) = self.all(name, **attributes)
        return found

    @property
    def text(self) -> str:
        """Return the visible text of an HTML element; non-breaking spaces become ordinary spaces."""
        return " ".join(self._raw().split())

    def _raw(self) -> str:
        return "".join(child if isinstance(child, str) else child._raw() + " " for child in self.children)

    @property
    def table(self) -> list[dict[str, str]]:
        """Return the rows of the only HTML table below an element, as dictionaries by column name."""
        columns = [cell.text for cell in self.one("thead").all("th")]
        return [
            dict(zip(columns, [cell.text for cell in row.all("td")], strict=True))
            for row in self.one("tbody").all("tr")
        ]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = Node("", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Node(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].name == tag, f"</{tag}> closes <{self.open[-1].name}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def read_page(text: str) -> Node:
    """Parse an HTML page and check that all elements are closed properly."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert [node.name for node in reader.open] == [""], "elements are left open"
    return reader.root
