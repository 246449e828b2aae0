"""Share of CPU time that the terminal view takes from a training in the same process, and the time between
two of its screens.
"""

import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.timing import cpu_times, figure
from esper.karn.run import open_run
from esper.karn.screen import screen
from esper.karn.terminal import SHARE_OF_DRAWING, SHARE_OF_TIME, TerminalView
from esper.leyline.rows import EpochRow, Row
from esper.nissa.writer import RunWriter
from tests.karn import fake_run, fake_training

EPISODES = 40
SECONDS_PER_EPOCH = 0.015
MOST_SHARE = 2 * SHARE_OF_TIME
"""Largest share of the time that the terminal view may take in this benchmark: twice its target share,
because no pause follows the last refresh.
"""
SECONDS_BETWEEN_SCREENS = 5.0


def bench_plain_lines_take_their_share_of_the_time_at_most(tmp_path: Path) -> None:
    rows = [fake_run.run_row(episodes=EPISODES)]
    rows += [row for episode in range(EPISODES) for row in fake_run.episode(episode)]
    spent, began = 0.0, time.monotonic()
    with (tmp_path / "log").open("w") as file, RunWriter(tmp_path / "run") as writer:
        view = TerminalView(tmp_path / "run", Console(file=file))
        for row in rows:
            writer.emit(row)
            if isinstance(row, EpochRow):
                writer.flush()
                time.sleep(SECONDS_PER_EPOCH)
                start = time.thread_time()
                view.refresh()
                spent += time.thread_time() - start
        share = spent / (time.monotonic() - began)
        view.close()

    figure("plain lines", 100 * share, "% of the time", at_most=100 * MOST_SHARE)


@pytest.mark.parametrize(
    ("kind", "rows"),
    [("run", [fake_run.run_row(), *fake_run.episode()]), ("training", fake_training.course(100))],
)
def bench_a_screen_is_drawn_every_few_seconds(tmp_path: Path, kind: str, rows: Iterable[Row]) -> None:
    with RunWriter(tmp_path) as writer:
        for row in rows:
            writer.emit(row)
    run = open_run(tmp_path)
    with (tmp_path / "screen").open("w") as file:
        console = Console(file=file, force_terminal=True, width=200, height=60)
        cost = cpu_times({kind: lambda: console.print(screen(run, 200))}, repeats=1)[kind]
    pause = cost / 1000 / SHARE_OF_DRAWING

    title = f"between two screens of a {kind}"
    figure(title, pause, "s", at_most=SECONDS_BETWEEN_SCREENS, note=f"{cost:.0f} ms each")
