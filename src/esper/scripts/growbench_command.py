"""``esper growbench record|check``: recording of decisions of growth."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pydantic import Field

from esper.leyline import EsperError, UnknownNameError, notify
from esper.run.run_config import Settings
from esper.scripts.flags import parse_words

BITS: Final = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
"""Environment variables with which torch computes the same bits on every processor that has AVX2."""
ACTIONS: Final = ("record", "check")


class GrowbenchFlags(Settings):
    """Record plans of growth (record), or train recorded plans again and compare all bits (check); see
    docs/growbench.md."""

    out: Path | None = None
    """Folder of the recording; the packaged recording unless given."""
    instances: int = Field(120, ge=1, le=100_000)
    """Number of instances to record."""
    processes: int = Field(1, ge=1, le=1000)
    """Number of processes, with one thread each."""
    hours: float = Field(1.0, gt=0.0)
    """Hours after which no further instance is begun."""
    instance: int = Field(0, ge=0)
    """Number of the instance to check."""
    rng_seed: int | None = None
    """Rng seed of the trainings to check; the first recorded one unless given."""
    plan: str | None = None
    """Plan to check, such as 5,14, or an empty text for no growth; all plans unless given."""


def growbench_command(args: Sequence[str]) -> None:
    needed = "what to do as its first word: record or check"
    words, flags = parse_words(GrowbenchFlags, "esper growbench ACTION", args, needed=needed)
    if words[0] not in ACTIONS:
        raise UnknownNameError("action", words[0], ACTIONS)
    os.environ.update(BITS)  # Torch reads these variables when it is first used.
    (_record if words[0] == "record" else _check)(flags)


def _record(flags: GrowbenchFlags) -> None:
    from esper.growbench.instances import instance
    from esper.growbench.recording import record

    if flags.out is None:
        raise EsperError("esper growbench record needs --out FOLDER, the folder of the recording to continue")
    instances = [instance(number) for number in range(flags.instances)]
    record(flags.out, instances, processes=flags.processes, hours=flags.hours, notify=notify)


def _check(flags: GrowbenchFlags) -> None:
    from esper.growbench.instances import RNG_SEEDS
    from esper.growbench.recording import regenerate
    from esper.growbench.store import PACKAGED, plan_of

    rng_seed = RNG_SEEDS[0] if flags.rng_seed is None else flags.rng_seed
    plan = None if flags.plan is None else plan_of(flags.plan)
    count, differences = regenerate(flags.out or PACKAGED, flags.instance, rng_seed, plan)
    if differences:
        raise EsperError(f"{len(differences)} values differ, the first ones: " + "; ".join(differences[:5]))
    print(f"{count} rows of instance {flags.instance}, rng seed {rng_seed}, are equal to the last bit")
