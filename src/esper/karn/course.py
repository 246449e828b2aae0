"""Follows a training: a screen on a terminal, a line per round anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from esper.karn.live import DrawnView, can_draw
from esper.karn.notation import clock, gain, points, sparkline
from esper.leyline import HEAD_NAMES, OP_NAMES
from esper.leyline.events import AlertRow, Row, UpdateRow

BAR: Final = 24
TREND: Final = 32
"""Columns of progress bar and trends; labels and numbers beside them fit into 80."""
ALARMS: Final = 3
"""How many of the last alerts are shown."""


class CourseView(DrawnView):
    """The sink that shows a training of ``rounds`` rounds; use it as a context manager around it."""

    def __init__(
        self, console: Console, rounds: int, title: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rounds = rounds
        self._clock = clock
        self._began = clock()
        self._title = title
        self._rows: list[UpdateRow] = []
        self._alerts: list[AlertRow] = []
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if can_draw(console) else None

    def emit(self, row: Row) -> None:
        """Take one row."""
        if isinstance(row, AlertRow):
            self._alerts.append(row)
        if not isinstance(row, UpdateRow):
            return
        self._rows.append(row)
        if self._live is None:
            print(round_line(row, self._rounds, self._left()), file=self._console.file, flush=True)
        else:
            self._live.update(self.render(), refresh=True)

    def _left(self) -> float:
        """Seconds to the end at the pace of the rounds seen so far."""
        pace = (self._clock() - self._began) / len(self._rows)
        return pace * (self._rounds - self._rows[-1].round)

    def render(self) -> Text:
        """The screen after the last round."""
        last = self._rows[-1]
        done = round(BAR * last.round / self._rounds)
        lines = [
            *([self._title] if self._title else []),
            f"round {last.round}/{self._rounds}  {'█' * done}{'░' * (BAR - done)}"
            f"  {clock(self._left())} left",
            "",
            f"return      {gain(last.mean_return, 2):>7}  {self._trend('mean_return')}",
            f"score       {points(last.val_score):>7}  {self._trend('val_score', 0, 100)}",
            f"evaluation  {self._evaluation()}",
            f"parameters  {_whole(last.params):>7}",
            f"ops         {_ops(last)}",
            f"entropy     {_entropies(last, 0, 4)}",
            f"            {_entropies(last, 4, 8)}",
            f"critic      explained variance {gain(last.explained_variance, 2)}",
            f"update      KL {points(last.approx_kl, 3)}   clipped {100 * last.clip_fraction:.0f} %",
        ]
        lines += [f"alert       {text}" for text in self._alarms()]
        return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")

    def _trend(self, column: str, low: float | None = None, high: float | None = None) -> str:
        values = [getattr(row, column) for row in self._rows[-TREND:]]
        known = [value for value in values if value is not None]
        if not known:
            return ""
        return sparkline(values, min(known) if low is None else low, max(known) if high is None else high)

    def _evaluation(self) -> str:
        judged = [row for row in self._rows if row.evaluation_return is not None]
        if not judged:
            return "      –  not yet"
        best = max(judged, key=lambda row: row.evaluation_return or 0.0)
        return (
            f"{points(judged[-1].evaluation_score):>7}  in round {judged[-1].round};"
            f" best {points(best.evaluation_score)} in round {best.round}"
        )

    def _alarms(self) -> list[str]:
        return [f"{row.rule} {row.event}: {row.scope}, round {row.round}" for row in self._alerts[-ALARMS:]]


def round_line(row: UpdateRow, rounds: int, seconds_left: float) -> str:
    """One round in one line."""
    line = (
        f"round {row.round}/{rounds}  left {clock(seconds_left)}  return {gain(row.mean_return, 2)}"
        f"  score {points(row.val_score)}  params {_whole(row.params)}"
        f"  ev {gain(row.explained_variance, 2)}  kl {points(row.approx_kl, 3)}"
        f"  entropy {points(row.entropy, 2)}"
        f"  {_ops(row)}"
    )
    if row.evaluation_return is not None:
        line += f"  | evaluation: return {row.evaluation_return:+.2f}, score {points(row.evaluation_score)}"
    if row.skipped is not None:
        line += f"  | update left out: {row.skipped}"
    return line


def _whole(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _ops(row: UpdateRow) -> str:
    shares = zip(OP_NAMES, row.op_shares, strict=True)
    return " ".join(f"{name.lower()} {100 * share:.0f}%" for name, share in shares if share)


def _entropies(row: UpdateRow, first: int, last: int) -> str:
    """Of some heads; an update that was left out has none."""
    found = list(zip(HEAD_NAMES, row.head_entropy, strict=False))[first:last]
    return "  ".join(f"{name} {'–' if value is None else f'{value:.2f}'}" for name, value in found)
