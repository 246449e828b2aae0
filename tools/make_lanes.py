"""Make docs/images/lanes.svg: what a report shows of one life, from a real run.

    python tools/make_lanes.py [RUN]    a directory that esper run left; the README's run unless given

The README's run is `esper run --task digits_impaired --decider heuristic --rng-seed 0`.
"""

import sys
import tempfile
from pathlib import Path

from esper.config import run_config
from esper.karn.figures import FIGURES, STYLE
from esper.karn.run import open_run
from esper.runner import run_arm

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "lanes.svg"
MARGIN = 16


def standalone(svg: str) -> str:
    """The drawing with its stylesheet inside and paper around it, as a file of its own."""
    opening, _, rest = svg.partition(">")
    _, _, width, height = opening.partition('viewBox="')[2].partition('"')[0].split()
    box = f"{-MARGIN} {-MARGIN} {float(width) + 2 * MARGIN:g} {float(height) + 2 * MARGIN:g}"
    opening = opening.replace(f"0 0 {width} {height}", box)
    return f"{opening}><style>{STYLE}svg.esper{{background:var(--paper)}}</style>{rest}\n"


def main(words: list[str]) -> None:
    lanes = next(figure for figure in FIGURES if figure.key == "lanes")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(words[0]) if words else run_arm(run_config(), "heuristic", Path(folder) / "run")
        picture = lanes.answer(open_run(run))
    if picture is None:
        sys.exit(f"'{words[0]}' holds no life to show")
    PICTURE.write_text(standalone(picture.svg), encoding="utf-8")
    print(f"{PICTURE.name}: {picture.caption}")


if __name__ == "__main__":
    main(sys.argv[1:])
