"""``esper watch RUN``: the screen of a run or a training, from another process and only by reading."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console

from esper.config import checked
from esper.karn.live import LiveView
from esper.karn.run import Run, open_run
from esper.karn.tail import Tail
from esper.leyline.errors import EsperError
from esper.leyline.events import EpochRow, Row, RunRow, UpdateRow
from esper.scripts.flags import parse_flags

DESCRIPTION = "Follow a run that goes on, or replay one that is over. Ctrl-C ends watching, never the run."
PROG = "esper watch RUN"
POLL_SECONDS: Final = 0.25
REPLAY_SECONDS: Final = 10.0
"""How long a replay takes unless its speed is given."""


class WatchConfig(BaseModel):
    """What to show of a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    env: int | None = Field(
        None,
        ge=0,
        description="Environment whose episodes are shown; of a training the best one unless given.",
    )
    speed: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="Replay what was recorded, so many times as fast as it happened; 0 jumps to the end."
        " Unless given, a run that is over is replayed in ten seconds.",
    )


def watch_command(args: Sequence[str]) -> None:
    """The first word is the run's directory, the rest are flags."""
    if not args or args[0].startswith("-"):
        parse_flags(WatchConfig, PROG, DESCRIPTION, args)
        raise EsperError("esper watch needs a run's directory as its first word, such as runs/mine")
    given, _ = parse_flags(WatchConfig, PROG, DESCRIPTION, args[1:])
    try:
        watch(open_run(args[0]), checked(WatchConfig, given), Console())
    except KeyboardInterrupt:
        return


def watch(run: Run, config: WatchConfig, console: Console) -> None:
    """Show what is recorded, then what comes, until the run is over."""
    is_over = run.state != "running"
    tail, place = Tail(run.path), Place(config.env)
    # Without a terminal nobody waits for a replay.
    is_replay = is_over and console.is_terminal if config.speed is None else config.speed > 0
    past, age = tail.read() if is_replay else tail.read_latest(), 0.0 if is_over else tail.age()
    speed = _speed(past, config.speed) if is_replay else 0.0
    # A replay has no clock of its own: all times are those that the rows tell.
    clock = (lambda: 0.0) if is_over else time.monotonic
    with LiveView(console, env=config.env, clock=clock) as view:
        for row in paced(past, speed, time.sleep):
            place.take(row)
            view.recall([row], age=age, aloud=True)
        while not is_over:
            is_over = run.state != "running"  # before reading, so that no last row is missed
            rows, age = tail.read(), 0.0
            if tail.is_anew:  # the run was resumed from before what is shown
                view.begin_anew()
                place, age = Place(config.env), tail.age()
            for row in rows:
                place.take(row)
                view.recall([row], age=age, aloud=True)
            if not (rows or is_over):
                time.sleep(POLL_SECONDS)
    console.print(
        f"the run in {run.path} has {run.state} {place}", soft_wrap=True, highlight=False, markup=False
    )


class Place:
    """How far a run has come, by its rows; refuses an environment that the run does not have."""

    def __init__(self, env: int | None) -> None:
        self._env = env
        self._run: RunRow | None = None
        self._done = 0

    def take(self, row: Row) -> None:
        """Take the next row."""
        if isinstance(row, RunRow):
            self._begin(row)
        elif isinstance(row, UpdateRow):
            self._done = row.iteration
        elif isinstance(row, EpochRow) and self._run is not None and self._run.iterations is None:
            self._done = row.epoch

    def _begin(self, run: RunRow) -> None:
        self._run = run
        if self._env is not None and self._env >= run.envs:
            raise EsperError(
                f"environment {self._env} is not in this run; it has {run.envs}, numbered from 0"
            )

    def __str__(self) -> str:
        if self._run is None:
            return "before it recorded anything"
        if self._run.iterations is not None:
            return f"after iteration {self._done} of {self._run.iterations}"
        return f"after epoch {self._done} of {self._run.horizon}"


def _speed(rows: Sequence[Row], asked: float | None) -> float:
    """Times as fast as it happened."""
    return sum(pauses(rows)) / REPLAY_SECONDS if asked is None else asked


def pauses(rows: Iterable[Row]) -> Iterator[float]:
    """Seconds before each row."""
    last = 0.0
    for row in rows:
        yield row.t - last
        last = row.t


def paced(rows: Sequence[Row], speed: float, sleep: Callable[[float], None]) -> Iterator[Row]:
    """The rows as they came, ``speed`` times as fast; all at once for 0."""
    owed = 0.0
    for row, pause in zip(rows, pauses(rows), strict=True):
        owed += pause / speed if speed else 0.0
        if owed > 0.01:
            sleep(owed)
            owed = 0.0
        yield row
