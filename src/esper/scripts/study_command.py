"""``esper study FILE``: comparison of arms at equal compute, with tables and a web page."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from esper.run.run_config import Settings
from esper.scripts.flags import parse_words


class StudyFlags(Settings):
    """Compare arms at equal compute, as described in FILE (docs/studies.md); finished runs are not repeated.

    Writes a table in Markdown, a page, and Parquet.
    """

    out: Path | None = Field(None, description="Folder of the study; else that of its name below runs/.")
    processes: int = Field(
        os.cpu_count() or 1, ge=1, le=1_000, description="Processes of one thread that share the runs."
    )


def study_command(args: Sequence[str]) -> None:
    needed = "the file of a study as its first word, such as study.toml"
    words, flags = parse_words(StudyFlags, "esper study FILE", args, needed=needed)
    from esper.study.study import run_study

    file = Path(words[0])
    out = flags.out or Path("runs") / file.stem
    print(run_study(file, out, flags.processes, lambda text: print(text, file=sys.stderr, flush=True)))
    print(f"study saved in {out} (table.md, study.html, answers.parquet)")
