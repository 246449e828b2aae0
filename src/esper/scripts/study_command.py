"""``esper study FILE``: comparison of arms at equal compute, with tables and a web page."""

import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from esper.leyline import notify, printable
from esper.run.run_config import Settings
from esper.scripts.flags import parse_words


class StudyFlags(Settings):
    """Compare arms at equal compute, as described in FILE (see docs/studies.md); completed runs are not
    repeated.

    A study writes a Markdown table, a web page and Parquet files.
    """

    out: Path | None = None
    """Folder of the study; runs/NAME unless given."""
    data: Path | None = None
    """File of the task text_scaling, or folder of image_scaling; the data of the study file unless given."""
    processes: int = Field(os.cpu_count() or 1, ge=1, le=1000)
    """Number of processes, with one thread each, that run the study."""


def study_command(args: Sequence[str]) -> None:
    needed = "the file of a study as its first word, such as study.toml"
    words, flags = parse_words(StudyFlags, "esper study FILE", args, needed=needed)
    from esper.study.study import run_study

    file = Path(words[0])
    out = flags.out or Path("runs") / file.stem
    run_study(file, out, flags.processes, notify, print, flags.data)
    print(f"study saved in {printable(str(out))} (table.md, study.html, answers.parquet)")
