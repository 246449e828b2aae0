"""The end of a run on one screen: what an episode came to, its seeds, and arms side by side.

Everything is a pure function of rows; the tables fit 80 columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from esper.karn import notation
from esper.karn.episodes import HORIZON, SeedHistory, seed_histories
from esper.karn.palette import LOOKS
from esper.leyline.events import EpisodeRow, RunRow, SeedRow, TransitionRow
from esper.leyline.stages import Stage

PART_OF_OTHERS: Final = frozenset({"pruned_seeds"})
"""Purposes whose compute is counted under the others as well, so they are no part of a total."""
_FATE_STAGE: Final[Mapping[str, Stage]] = {
    "fossilized": Stage.FOSSILIZED,
    "pruned": Stage.PRUNED,
    "removed at horizon": Stage.PRUNED,
}


def total_flops(flops: Mapping[str, int]) -> int:
    """All compute, each operation counted once."""
    return sum(amount for purpose, amount in flops.items() if purpose not in PART_OF_OTHERS)


def episode_summary(
    run: RunRow, episode: EpisodeRow, seeds: Sequence[SeedRow], transitions: Sequence[TransitionRow]
) -> RenderableType:
    """One episode: its scores, parameters and compute, and a table of its seeds."""
    episodes = seed_histories(run, episode, seeds, transitions)
    title = Text(f"{run.task} · {run.controller} · rng seed {run.rng_seed}", style="bold")
    title.append(f"   {episode.epoch} epochs in {notation.clock(episode.seconds)}", style="not bold")
    return Group(
        title, _facts(episode), Text(""), _seed_table(episodes) if episodes else Text("no seed germinated")
    )


def _facts(episode: EpisodeRow) -> Table:
    gain = notation.difference(episode.val_score, episode.twin_val_score)
    facts = Table.grid(padding=(0, 2, 0, 0))
    if episode.ended_by != HORIZON:
        facts.add_row("ended by", episode.ended_by)
    facts.add_row(
        "validation",
        f"{notation.points(episode.val_score)} (best {notation.points(episode.best_val_score)});"
        f" twin {notation.points(episode.twin_val_score)}, difference {notation.gain(gain)}",
    )
    facts.add_row("test", notation.points(episode.test_score))
    facts.add_row(
        "parameters",
        f"{notation.count(episode.host_params)} → {notation.count(episode.params)}"
        f" ({notation.factor(episode.params, episode.host_params)})",
    )
    facts.add_row(
        "inference",
        f"{notation.flop(episode.host_flops_per_sample)} → {notation.flop(episode.flops_per_sample)}"
        f" a sample ({notation.factor(episode.flops_per_sample, episode.host_flops_per_sample)})",
    )
    facts.add_row("training", notation.flop(total_flops(episode.flops)))
    for purpose, amount in episode.flops.items():
        if amount == 0:
            continue
        label = ("of which " if purpose in PART_OF_OTHERS else "") + purpose.replace("_", " ")
        facts.add_row("", f"{notation.flop(amount):>11}  {label}")
    return facts


def _seed_table(episodes: Sequence[SeedHistory]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False, pad_edge=False)
    # Only a seed's course and fate are wrapped where room is short.
    table.add_column("slot", no_wrap=True)
    table.add_column("seed", no_wrap=True)
    table.add_column("born", justify="right", no_wrap=True)
    table.add_column("episode")
    table.add_column("fate")
    for heading in ("params", "contribution", "Shapley"):
        table.add_column(heading, justify="right", no_wrap=True)
    for episode in episodes:
        table.add_row(
            episode.slot,
            f"{episode.blueprint}\n{episode.style or notation.UNKNOWN}",
            str(episode.germinated_at),
            episode.course,
            _fate_text(episode),
            notation.count(episode.params),
            notation.gain_with_error(episode.contribution, episode.contribution_error),
            notation.gain(episode.shapley),
        )
    return table


def _fate_text(episode: SeedHistory) -> Text:
    """Two lines, like the seed's name and style beside it."""
    stage = _FATE_STAGE.get(episode.fate)
    fate = Text(episode.fate.replace(" ", "\n", 1), style=LOOKS[stage].colour if stage else "")
    if episode.fate in ("fossilized", "pruned"):
        fate.append(f"\nat {episode.fate_epoch}", style="default")
    return fate.append(f": {episode.reason}", style="default") if episode.reason else fate


def comparison(arms: Sequence[tuple[str, EpisodeRow]]) -> Table:
    """Arms below each other, each with its difference from the last one, the control."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column("arm")
    for heading in ("validation", "test", "params", "compute"):
        table.add_column(heading, justify="right", no_wrap=True)
    if not arms:
        return table
    control = arms[-1][1]
    for label, episode in arms[:-1]:
        table.add_row(Text(label), *_compared_cells(episode, control))
    table.add_row(Text(arms[-1][0]), *_cells(control))
    return table


def _cells(episode: EpisodeRow) -> tuple[str, ...]:
    return (
        notation.points(episode.val_score),
        notation.points(episode.test_score),
        notation.count(episode.params),
        notation.flop(total_flops(episode.flops)),
    )


def _compared_cells(episode: EpisodeRow, control: EpisodeRow) -> list[str]:
    differences = (
        notation.gain(episode.val_score - control.val_score),
        notation.gain(episode.test_score - control.test_score),
        notation.factor(episode.params, control.params),
        notation.factor(total_flops(episode.flops), total_flops(control.flops)),
    )
    return [f"{cell} ({change})" for cell, change in zip(_cells(episode), differences, strict=True)]


def as_json(
    run: RunRow, episode: EpisodeRow, seeds: Sequence[SeedRow], transitions: Sequence[TransitionRow]
) -> dict[str, Any]:
    """The content of ``episode_summary`` as plain values; None is unknown."""
    return {
        "run": run.name,
        "task": run.task,
        "controller": run.controller,
        "rng_seed": run.rng_seed,
        "env": episode.env,
        "episode": episode.episode,
        "epochs": episode.epoch,
        "ended_by": episode.ended_by,
        "seconds": episode.seconds,
        "val_score": episode.val_score,
        "best_val_score": episode.best_val_score,
        "twin_val_score": episode.twin_val_score,
        "val_gain_over_twin": notation.difference(episode.val_score, episode.twin_val_score),
        "test_score": episode.test_score,
        "host_params": episode.host_params,
        "params": episode.params,
        "host_flops_per_sample": episode.host_flops_per_sample,
        "flops_per_sample": episode.flops_per_sample,
        "flops_total": total_flops(episode.flops),
        "flops": dict(episode.flops),
        "ops": dict(zip(run.ops, episode.op_counts, strict=True)),
        "refused": episode.refused,
        "seeds": [_seed_json(episode) for episode in seed_histories(run, episode, seeds, transitions)],
    }


def _seed_json(episode: SeedHistory) -> dict[str, Any]:
    return {
        "slot": episode.slot,
        "blueprint": episode.blueprint,
        "style": episode.style,
        "germinated_at": episode.germinated_at,
        "stages": [{"stage": stage.name, "epochs": epochs} for stage, epochs in episode.stages],
        "fate": episode.fate,
        "fate_epoch": episode.fate_epoch,
        "cause": episode.cause,
        "reason": episode.reason,
        "params": episode.params,
        "contribution": episode.contribution,
        "contribution_error": episode.contribution_error,
        "shapley": episode.shapley,
    }


def comparison_as_json(arms: Sequence[tuple[str, EpisodeRow]]) -> list[dict[str, Any]]:
    """The content of ``comparison`` as plain values; differences are to the last arm, the control."""
    if not arms:
        return []
    control = arms[-1][1]
    return [
        {
            "arm": label,
            "val_score": episode.val_score,
            "val_difference": episode.val_score - control.val_score,
            "test_score": episode.test_score,
            "test_difference": episode.test_score - control.test_score,
            "params": episode.params,
            "flops_total": total_flops(episode.flops),
        }
        for label, episode in arms
    ]
