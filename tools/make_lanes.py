"""Make docs/images/lanes.svg: the chart of the slots of one episode in a report, from a real run.

    python tools/make_lanes.py                 run `esper run --task digits_impaired` and draw it
    python tools/make_lanes.py RUN_DIRECTORY   draw an existing run

Without RUN_DIRECTORY, a new run is written to a temporary folder.
"""

import argparse
import re
import tempfile
from pathlib import Path

from esper.karn.figures import FIGURES
from esper.karn.run import open_run
from esper.run.arm import run_arm
from esper.run.run_config import run_config

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "lanes.svg"
MARGIN = 16


def on_paper(svg: str) -> str:
    """Return the SVG with a margin and a background, so that the chart is readable on any page."""

    def widened(box: re.Match[str]) -> str:
        width, height = (float(size) + 2 * MARGIN for size in box.groups())
        return f'viewBox="{-MARGIN} {-MARGIN} {width:g} {height:g}" style="background:var(--paper)"'

    return re.sub(r'viewBox="0 0 (\S+) (\S+)"', widened, svg, count=1) + "\n"


def main() -> None:
    """Write the chart of the slots of the given run, or of a new run."""
    parser = argparse.ArgumentParser(description="Draw the lanes of the documents.")
    parser.add_argument("run", nargs="?", type=Path, help="a run directory; a new run unless given")
    given = parser.parse_args().run
    lanes = next(figure for figure in FIGURES if figure.key == "lanes")
    with tempfile.TemporaryDirectory() as scratch:
        directory = given or run_arm(
            run_config(task="digits_impaired"), "heuristic", Path(scratch) / "heuristic"
        )
        picture = lanes.answer(open_run(directory))
    if picture is None:
        parser.error(f"'{directory}' holds no episode to draw")
    PICTURE.write_text(on_paper(picture.standalone()), encoding="utf-8")
    print(f"{PICTURE.name}: {PICTURE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
