"""The screens that are kept as text files: which rows, how large a terminal.

``python -m tests.karn.screens`` draws them anew; look at every difference before it is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from esper.karn.following import Following
from esper.karn.screen import render
from esper.leyline.events import EpochRow, Row
from tests.karn import fake_run, fake_training

FOLDER = Path(__file__).with_name("drawn")
SMALL, LARGE = (80, 24), (200, 60)


def run_after(epoch: int, *, episode: int = 0) -> Iterator[Row]:
    """A run followed until the given epoch of the given episode ended."""
    yield fake_run.run_row(episodes=episode + 1)
    for number in range(episode + 1):
        for row in fake_run.episode(number):
            yield row
            if isinstance(row, EpochRow) and (number, row.epoch) == (episode, epoch):
                return


def finished_run() -> Iterator[Row]:
    yield fake_run.run_row()
    yield from fake_run.episode()
    yield fake_run.alert_row()


def bare_run() -> Iterator[Row]:
    """A run of which nobody knows the twin, and that recorded no seeds."""
    for row in fake_training.without_seeds(run_after(6)):
        if isinstance(row, EpochRow):
            row.twin_score = row.train_loss = None
        yield row


CASES: dict[str, tuple[Callable[[], Iterable[Row]], tuple[int, int]]] = {
    "run-before-its-first-epoch": (lambda: run_after(0), SMALL),
    "run-under-way": (lambda: run_after(6), SMALL),
    "run-under-way-large": (lambda: run_after(6), LARGE),
    "run-without-seed-rows-and-twin": (bare_run, SMALL),
    "run-finished-with-alert": (finished_run, SMALL),
    "run-finished-with-alert-large": (finished_run, LARGE),
    "training-before-its-first-iteration": (lambda: [fake_training.run_row()], SMALL),
    "training": (lambda: fake_training.course(42), SMALL),
    "training-large": (lambda: fake_training.course(42), LARGE),
    "training-without-seed-rows": (lambda: fake_training.course(42, seeds=False), SMALL),
    "training-one-slot": (lambda: fake_training.course(42, slots=1), SMALL),
    "training-eight-slots": (lambda: fake_training.course(42, slots=8), SMALL),
    "training-in-trouble": (lambda: fake_training.troubled_course(42), SMALL),
    "training-in-trouble-large": (lambda: fake_training.troubled_course(42), LARGE),
    "training-in-trouble-eight-slots": (lambda: fake_training.troubled_course(42, slots=8), SMALL),
}


def state_of(rows: Iterable[Row], env: int | None = None) -> Following:
    state = Following(env)
    for row in rows:
        state.take(row, 0.0)
    return state


def drawn(state: Following, width: int, height: int) -> str:
    """The screen as text, without blanks at the ends of lines."""
    return "\n".join(line.rstrip() for line in render(state, width, height).plain.split("\n"))


def path_of(case: str) -> Path:
    return FOLDER / f"{case}.txt"


def text_of(case: str) -> str:
    """What a terminal shows; its last line is left to the cursor."""
    rows, (width, height) = CASES[case]
    return drawn(state_of(rows()), width, height - 1) + "\n"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for case in CASES:
        path_of(case).write_text(text_of(case), encoding="utf-8")


if __name__ == "__main__":
    main()
