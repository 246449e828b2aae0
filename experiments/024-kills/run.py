"""Does a training that is killed 200 times end like one that is never disturbed?

``training.py`` runs once undisturbed. Then it is started again and again in another folder. Each process is
killed by SIGKILL after a random time inside ``esper.grow``, until 200 processes have been killed; one more
process runs to the end. The time is uniform between 0 and a limit of about 1.5 seconds, which is longer if
the training is behind and shorter if it is ahead, so that the kills are spread over all epochs. At the end
weights, losses and all rows of both trainings are compared, the rows without their time columns.

Run with ``.venv/bin/python experiments/024-kills/run.py`` (20 to 30 minutes on one core); it rewrites
results.json beside this file and docs/images/kills.svg. ``run.py draw`` only draws the picture again.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from picture import draw
from training import EPOCHS

from esper.karn.run import open_run
from esper.leyline.rows import TABLES, EpochRow
from esper.nissa.alert_rules import MACHINE_RULES
from esper.run.grow_directory import CHECKPOINT

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
PICTURE = HERE.parents[1] / "docs" / "images" / "kills.svg"
KILLS = 200
LIMIT = 1.5
"""Largest time in seconds from the call to the kill, if the training is as far as it is planned to be."""
BEHIND = 6.0
"""Number of epochs behind this plan that multiply the largest time by e."""
TIMES = {"t", "seconds", "ms", "phase_ms", "started", "git_revision"}
"""Columns that differ between two repetitions of a training."""


@dataclass(frozen=True)
class Kill:
    """Outcome of one killed process."""

    epoch: int
    """Finished epochs in the checkpoint that the process left."""
    imports: float
    """Seconds from the start of the process to the call of ``esper.grow``."""
    loading: float | None
    """Seconds from the call to the first step of the optimiser; None if the process was killed before."""
    repeated: float
    """Seconds of work inside ``esper.grow`` since the last checkpoint or the call, which are lost."""


def start(out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / "training.py"), str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def killed(out: Path, seconds: float) -> Kill:
    """Start a process that continues the training, and kill it ``seconds`` after the call of ``grow``.

    Raises:
        RuntimeError: The process ended by itself.
    """
    began = time.time()
    process = start(out)
    assert process.stdout is not None
    ready = float(process.stdout.readline().split()[1])
    time.sleep(max(0.0, ready + seconds - time.time()))
    end = time.time()
    process.kill()
    steps = [float(line.split()[1]) for line in process.stdout]
    if process.wait() != -9:
        raise RuntimeError(f"the training ended before it was killed {KILLS} times")
    checkpoint = out / "run" / CHECKPOINT
    saved = checkpoint.stat().st_mtime if checkpoint.exists() else 0.0
    return Kill(
        epoch=finished_epochs(out),
        imports=ready - began,
        loading=steps[0] - ready if steps else None,
        repeated=end - max(saved, ready),
    )


def finished_epochs(out: Path) -> int:
    """Return the number of finished epochs in the checkpoint, whose first bytes are its SHA-256."""
    checkpoint = out / "run" / CHECKPOINT
    if not checkpoint.exists():
        return 0
    with checkpoint.open("rb") as file:
        file.seek(32)
        with tempfile.TemporaryFile() as content:
            content.write(file.read())
            content.seek(0)
            return len(torch.load(content, weights_only=True)["epochs"]) - 1


def rows_of(out: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of all tables but ``resource``, without times and alerts about the machine."""
    run = open_run(out / "run")
    return {
        table: [
            {name: value for name, value in msgspec.to_builtins(row).items() if name not in TIMES}
            for row in run.rows(kind)
            if getattr(row, "rule", None) not in MACHINE_RULES
        ]
        for table, kind in TABLES.items()
        if table != "resource"
    }


def losses_of(out: Path) -> list[float]:
    return [row.val_loss for row in open_run(out / "run").rows(EpochRow)]


def weights_of(out: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(out / "grown.pt", weights_only=True)["state"]
    return state


def measure(folder: Path) -> dict[str, Any]:
    """Run both trainings in ``folder`` and return what was measured."""
    undisturbed, disturbed = folder / "undisturbed", folder / "disturbed"
    for out in (undisturbed, disturbed):
        out.mkdir()
    began = time.time()
    assert start(undisturbed).wait() == 0
    seconds = time.time() - began
    print(f"undisturbed training: {seconds:.0f} s", flush=True)

    rng = random.Random(0)
    kills: list[Kill] = []
    while len(kills) < KILLS:
        behind = EPOCHS * len(kills) / (KILLS + 1) - finished_epochs(disturbed)
        limit = LIMIT * math.exp(behind / BEHIND)
        kills.append(killed(disturbed, rng.uniform(0.0, limit)))
        print(len(kills), kills[-1], f"limit {limit:.2f} s", flush=True)
    assert start(disturbed).wait() == 0

    rows, again = rows_of(undisturbed), rows_of(disturbed)
    weights, weights_again = weights_of(undisturbed), weights_of(disturbed)
    equal = [name for name in weights if torch.equal(weights[name], weights_again[name])]
    return {
        "seconds": seconds,
        "kills": [vars(kill) for kill in kills],
        "val_loss": [
            [row.val_loss for row in open_run(out / "run").rows(EpochRow)] for out in (undisturbed, disturbed)
        ],
        "equal_tensors": len(equal),
        "tensors": [len(weights), len(weights_again)],
        "equal_tables": [table for table in rows if rows[table] == again[table]],
        "tables": list(rows),
        "rows": [sum(map(len, found.values())) for found in (rows, again)],
    }


def main() -> None:
    if sys.argv[1:] != ["draw"]:
        with tempfile.TemporaryDirectory() as folder:
            RESULTS.write_text(json.dumps(measure(Path(folder)), indent=1) + "\n")
    PICTURE.write_text(draw(json.loads(RESULTS.read_text())), encoding="utf-8")


if __name__ == "__main__":
    main()
