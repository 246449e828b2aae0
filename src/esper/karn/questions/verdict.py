"""What growth bought: the score of every arm against its parameters and against its compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from esper.karn.questions.episodes import judged
from esper.karn.run import Run
from esper.karn.statistics import Estimate, estimate
from esper.karn.summary import PART_OF_OTHERS


@dataclass(frozen=True, slots=True)
class Arm:
    """One run of a comparison, by the episodes that say what it came to."""

    name: str
    episodes: int
    test_score: Estimate
    """Of the committed networks, with its 95 % interval where there are several episodes."""
    val_score: Estimate
    params: float
    """Mean of the committed networks."""
    flops: float
    """Mean compute of a whole episode, each operation counted once."""
    flops_per_sample: float
    """Mean of one forward pass of the committed networks."""


def verdict(runs: Mapping[str, Run]) -> tuple[Arm, ...]:
    """The arms that have a finished episode, in the order given."""
    arms = (_arm(name, run) for name, run in runs.items())
    return tuple(arm for arm in arms if arm is not None)


def _arm(name: str, run: Run) -> Arm | None:
    parts = ", ".join(f"'{purpose}'" for purpose in sorted(PART_OF_OTHERS))
    found = run.sql(
        f"""
        SELECT test_score, val_score, params, flops_per_sample,
               list_sum([entry.value FOR entry IN map_entries(flops) IF entry.key NOT IN ({parts})])
        FROM episode WHERE {judged(run)}
        """
    ).fetchall()
    if not found:
        return None
    test, validation, params, per_sample, flops = zip(*found, strict=True)
    return Arm(
        name=name,
        episodes=len(found),
        test_score=estimate(test),
        val_score=estimate(validation),
        params=fmean(params),
        flops=fmean(flops),
        flops_per_sample=fmean(per_sample),
    )
