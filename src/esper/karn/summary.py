"""Summary printed by ``esper run``: scores and costs of an episode, its seeds, and a comparison of arms.

Tables of the summary of an episode fit a terminal of 80 columns.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich import box
from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from esper.karn import notation
from esper.karn.metric import SCORE
from esper.karn.palette import LOOKS
from esper.karn.seed_histories import HORIZON, SeedHistory
from esper.leyline.rows import EpisodeRow, RunRow

_NOT_ADDED: Final = {"pruned_seeds": "of which pruned seeds", "validation": "validation, not charged"}
"""Purposes whose FLOPs are not added to the charged FLOPs, with their display names. FLOPs of pruned seeds
are already counted under other purposes, and validation is not charged.
"""
_COPIED: Final = (
    *("env", "episode", "ended_by", "seconds", "val_score", "best_val_score", "twin_val_score", "test_score"),
    *("host_params", "params", "host_flops_per_sample", "flops_per_sample", "flops", "refused"),
)
"""Columns of an episode row that are copied to the JSON form of the summary."""


def charged_flops(flops: Mapping[str, int]) -> int:
    """Return the FLOPs that count against the budget; validation after each epoch does not count."""
    return sum(amount for purpose, amount in flops.items() if purpose not in _NOT_ADDED)


def episode_summary(run: RunRow, episode: EpisodeRow, seeds: Sequence[SeedHistory]) -> RenderableType:
    """Return scores, parameters and compute of an episode, and a table of its seeds."""
    title = Text(f"{run.task} · {run.controller} · rng seed {run.rng_seed}", style="bold")
    title.append(f"   {episode.epoch} epochs in {notation.clock(episode.seconds)}", style="not bold")
    table = _seed_table(seeds) if seeds else Text("no seed germinated")
    return Group(title, _facts(episode), Text(""), table)


def _facts(episode: EpisodeRow) -> Table:
    lead = notation.difference(episode.val_score, episode.twin_val_score)
    facts = Table.grid(padding=(0, 2, 0, 0))
    if episode.ended_by != HORIZON:
        facts.add_row("ended by", episode.ended_by)
    facts.add_row(
        "validation",
        f"{notation.points(episode.val_score)} (best {notation.points(episode.best_val_score)});"
        f" twin {notation.points(episode.twin_val_score)}, difference {notation.gain(lead)}",
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
    facts.add_row("training", notation.flop(charged_flops(episode.flops)))
    for purpose, amount in episode.flops.items():
        if amount:
            facts.add_row("", f"{notation.flop(amount):>11}  {_NOT_ADDED.get(purpose, purpose)}")
    return facts


def _seed_table(seeds: Sequence[SeedHistory]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False, pad_edge=False)
    # Only the columns "stages" and "fate" of the table of seeds may wrap in a narrow terminal.
    texts, wrapped = ("slot", "seed"), ("stages", "fate")
    for heading in (*texts, "born", *wrapped, "params", "contribution", "Shapley"):
        side: JustifyMethod = "left" if heading in texts + wrapped else "right"
        table.add_column(heading, justify=side, no_wrap=heading not in wrapped)
    for seed in seeds:
        name = f"{seed.blueprint}\n{seed.style or notation.UNKNOWN}"
        contribution = SCORE.gain_with_error(seed.contribution, seed.contribution_error)
        numbers = (notation.count(seed.params), contribution, notation.gain(seed.shapley))
        table.add_row(seed.slot, name, str(seed.germinated_at), seed.course, _fate_text(seed), *numbers)
    return table


def _fate_text(seed: SeedHistory) -> Text:
    """Return the fate of a seed in two lines of text, because the cell with blueprint and style has two
    lines.
    """
    style = LOOKS[seed.fate_stage].colour if seed.fate_stage else ""
    fate = Text(seed.fate.replace(" ", "\n", 1), style=style)
    if seed.fate in ("fossilized", "pruned"):
        fate.append(f"\nat {seed.fate_epoch}", style="default")
    return fate.append(f": {seed.reason}", style="default") if seed.reason else fate


def comparison(arms: Sequence[tuple[str, EpisodeRow]]) -> Table:
    """Return a table of arms with the difference of each arm from the control, which is the last arm."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column("arm")
    for heading in ("validation", "test", "params", "compute"):
        table.add_column(heading, justify="right", no_wrap=True)
    *others, (name, control) = arms
    for label, episode in others:
        differences = (
            notation.gain(notation.difference(episode.val_score, control.val_score)),
            notation.gain(notation.difference(episode.test_score, control.test_score)),
            notation.factor(episode.params, control.params),
            notation.factor(charged_flops(episode.flops), charged_flops(control.flops)),
        )
        pairs = zip(_cells(episode), differences, strict=True)
        table.add_row(Text(label), *(f"{cell} ({change})" for cell, change in pairs))
    table.add_row(Text(name), *_cells(control))
    return table


def _cells(episode: EpisodeRow) -> tuple[str, ...]:
    return (
        notation.points(episode.val_score),
        notation.points(episode.test_score),
        notation.count(episode.params),
        notation.flop(charged_flops(episode.flops)),
    )


def as_json(run: RunRow, episode: EpisodeRow, seeds: Sequence[SeedHistory]) -> dict[str, Any]:
    """Return the numbers of ``episode_summary`` as JSON values; a value of None is unknown."""
    return {
        "run": run.name,
        "task": run.task,
        "controller": run.controller,
        "rng_seed": run.rng_seed,
        "epochs": episode.epoch,
        **{name: getattr(episode, name) for name in _COPIED},
        "val_gain_over_twin": notation.difference(episode.val_score, episode.twin_val_score),
        "flops_charged": charged_flops(episode.flops),
        "ops": dict(zip(run.ops, episode.op_counts, strict=True)),
        "seeds": [_seed_json(seed) for seed in seeds],
    }


def _seed_json(seed: SeedHistory) -> dict[str, Any]:
    stages = [{"stage": stage.name, "epochs": epochs} for stage, epochs in seed.stages]
    return {name: value for name, value in seed._asdict().items() if name != "seed"} | {"stages": stages}
