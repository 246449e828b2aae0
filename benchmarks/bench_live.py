"""What following a run costs the trainer: CPU time per epoch, against 1 % of a step of 15 ms."""

import time
from pathlib import Path

import pytest
from esper.karn.following import Following
from esper.karn.live import REDRAWS_PER_SECOND, LiveView
from rich.console import Console

from esper.karn.screen import render
from tests.karn import fake_run, fake_training

MICROSECONDS_PER_STEP = 150.0
SHARE_OF_TIME_DRAWING = 0.02
EPISODES = 40
ITERATIONS = 5


def _plain_cost(path: Path) -> float:
    rows = [row for episode in range(EPISODES) for row in fake_run.episode(episode)]
    with path.open("w", encoding="utf-8") as file, LiveView(Console(file=file)) as view:
        view.emit(fake_run.run_row(episodes=EPISODES))
        began = time.process_time()
        for row in rows:
            view.emit(row)
        return (time.process_time() - began) / (EPISODES * fake_run.EPOCHS) * 1e6


def bench_plain_lines_cost_at_most_one_percent_of_a_step(tmp_path: Path) -> None:
    cost = min(_plain_cost(tmp_path / f"{number}.log") for number in range(ITERATIONS))

    print(f"plain lines: {cost:.0f} µs per step (limit {MICROSECONDS_PER_STEP:.0f})")
    assert cost <= MICROSECONDS_PER_STEP


@pytest.mark.parametrize("kind", ["run", "training"])
def bench_drawing_takes_at_most_a_fiftieth_of_the_time(tmp_path: Path, kind: str) -> None:
    state = Following()
    rows = [fake_run.run_row(), *fake_run.episode()] if kind == "run" else fake_training.course(100)
    for row in rows:
        state.take(row, 0.0)
    with (tmp_path / "screen").open("w", encoding="utf-8") as file:
        console = Console(file=file, force_terminal=True, width=200, height=60)
        costs = []
        for _ in range(20):
            began = time.process_time()
            console.print(render(state, 200, 60))
            costs.append(time.process_time() - began)
    share = min(costs) * REDRAWS_PER_SECOND

    print(f"screen of a {kind}: {min(costs) * 1e3:.1f} ms a drawing, {share:.2%} of the time")
    assert share <= SHARE_OF_TIME_DRAWING
