"""Placeholder until the rules arrive."""

from __future__ import annotations

from esper.leyline.events import AlertRow, Row, RunRow


class Watch:
    def __init__(self, run: RunRow) -> None:
        self._run = run

    def take(self, row: Row) -> list[AlertRow]:
        return []
