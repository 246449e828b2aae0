"""A process that writes a made-up run as it is told: ``led_writer.py RUN``, one word per line of its input.

``wait`` writes nothing, ``run`` the run's own row, ``epoch`` all rows up to the end of the next epoch, and
``end`` the rest.
It says each word back when the rows are on the disk.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from esper.leyline.events import EpochRow, Row
from esper.nissa.writer import RunWriter
from tests.karn import fake_run


def rows_of(word: str, episode: Iterator[Row]) -> Iterator[Row]:
    if word == "run":
        yield fake_run.run_row()
    if word in ("wait", "run"):
        return
    for row in episode:
        yield row
        if word == "epoch" and isinstance(row, EpochRow):
            return


def main() -> None:
    episode = fake_run.episode()
    with RunWriter(Path(sys.argv[1])) as writer:
        for line in sys.stdin:
            for row in rows_of(line.strip(), episode):
                writer.emit(row)
            writer.flush()
            sys.stdout.write(line)
            sys.stdout.flush()


if __name__ == "__main__":
    main()
