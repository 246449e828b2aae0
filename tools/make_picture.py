"""Make docs/images/run.svg: the last screen of a real run, as a terminal of 80 columns shows it.

    python tools/make_picture.py                 run `esper run --task digits_impaired` and draw it
    python tools/make_picture.py RUN_DIRECTORY   draw an existing run

``esper watch`` draws its screen with the same function as this script. The pictures of two new runs differ
only in the displayed times.
"""

import argparse
import io
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.terminal_theme import MONOKAI

from esper.karn.run import open_run
from esper.karn.screen import screen
from esper.run.arm import run_arm
from esper.run.run_config import run_config

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "run.svg"
WIDTH = 80

# SVG template of the package rich without its web font, so that showing the picture downloads nothing.
SVG_FORMAT = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
  <style>
    .{unique_id}-matrix {{
      font-family: "DejaVu Sans Mono", "Liberation Mono", Menlo, Consolas, monospace;
      font-size: {char_height}px;
      line-height: {line_height}px;
    }}
    .{unique_id}-title {{
      font-family: "DejaVu Sans", Helvetica, Arial, sans-serif;
      font-size: 18px;
    }}
    {styles}
  </style>
  <defs>
    <clipPath id="{unique_id}-clip-terminal">
      <rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
    </clipPath>
    {lines}
  </defs>
  {chrome}
  <g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
    {backgrounds}
    <g class="{unique_id}-matrix">
    {matrix}
    </g>
  </g>
</svg>
"""


def last_screen(directory: Path) -> str:
    """Return the terminal screen after the last row of a run, as SVG."""
    run = open_run(directory)
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(screen(run, WIDTH))
    title = f"esper run --task {run.row.task}"
    return console.export_svg(title=title, theme=MONOKAI, code_format=SVG_FORMAT, unique_id="esper")


def main() -> None:
    """Write the picture of the terminal screen of the given run, or of a new run."""
    parser = argparse.ArgumentParser(description="Draw the picture of the README.")
    parser.add_argument("run", nargs="?", type=Path, help="a run directory; a new run unless given")
    given = parser.parse_args().run
    with tempfile.TemporaryDirectory() as scratch:
        directory = given or Path(scratch) / "run"
        if given is None:
            # Torch uses one thread, as in ``esper run``, because more threads change the order of
            # floating-point sums.
            torch.set_num_threads(1)
            run_arm(run_config(task="digits_impaired"), "heuristic", directory)
        picture = last_screen(directory)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(picture, encoding="utf-8")
    print(f"{PICTURE.name}: {len(picture)} bytes")


if __name__ == "__main__":
    main()
