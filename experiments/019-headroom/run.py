"""Is there anything to decide? Plans of growth on 24 instances of ``digits_mixture``: one each, one for all.

Every instance is run under every plan on four rng seeds, all at the instance's own budget.

    score = 100 · log(loss of the ungrown twin / loss), with the twin of the same rng seed

is about the per cent by which the loss is below the twin's. Plans are chosen by the validation score of the
first two rng seeds, and the test scores of the other two are reported. The headroom is what it is worth to
choose for each instance:

    (best plan per instance) − (one best plan for all), mean over instances ± its standard error

Run with ``.venv/bin/python experiments/019-headroom/run.py`` (about ten minutes of one core); it goes on
where it stopped and rewrites table.md beside this file.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

from esper.build import one_thread
from esper.tamiyo import OffController, PeriodicController, parse_plan
from esper.tolaria.episode import run_episode
from esper.tolaria.seeding import EpisodeStreams
from esper.tolaria.tasks import TaskSpec, task_named
from esper.tolaria.tasks.spec import Instance, InstanceDistribution
from esper.tolaria.vector import SerialVector

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
TASK = task_named("digits_mixture")
INSTANCES = 24
CHOOSING, REPORTING = (0, 1), (2, 3)
SLOTS = {"a": "r0c0", "b": "r0c1", "c": "r0c2"}
PLANS = (
    *("", "a0", "b0", "b1", "b2", "b4", "c0", "c1", "c2"),
    *("b0 c1", "b2 c3", "b4 c5", "b0 c3", "a0 b1 c2", "b0 c1 a2"),
)
"""Slots from the input on, each with the step, of 8, before which its seed is planted; growth ends with step
6. What an instance has no slot for is left out."""
Cells = dict[tuple[int, str, int], dict[str, float]]


def drawn(number: int) -> Instance:
    """Instance ``number`` of the mixture, with budgets spread evenly instead of drawn."""
    shares = TASK.instances.budget_shares
    instance = TASK.instances.draw(EpisodeStreams(1_500_000, 0, number).generator("instance"))
    return replace(instance, budget_share=shares[number * len(shares) // INSTANCES])


def point(instance: Instance) -> TaskSpec:
    """The task that always draws ``instance``, slots aside."""
    only = InstanceDistribution(
        widths=(instance.widths,),
        kernels=(instance.kernel,),
        learning_rates=(instance.learning_rate,),
        data_shares=(instance.data_share,),
        budget_shares=(instance.budget_share,),
    )
    return replace(TASK, instances=only)


def possible(plan: str, instance: Instance) -> str:
    """What of ``plan`` the instance has slots for."""
    enabled = dict(zip(SLOTS, instance.enabled, strict=True))
    return " ".join(entry for entry in plan.split() if enabled[entry[0]])


def run(instance: Instance, plan: str, rng_seed: int) -> dict[str, float]:
    vector = SerialVector(point(instance), rng_seed=rng_seed, enabled=instance.enabled)
    vector.reset(0)
    space = vector.action_space
    text = ",".join(f"conv_light@{SLOTS[entry[0]]}:{entry[1:]}" for entry in plan.split())
    controller = PeriodicController(space, parse_plan(text, space)) if plan else OffController(space)
    (report,) = run_episode(vector, controller, 0)
    return {"val": math.log(report.val_loss), "test": math.log(report.test_loss), "points": report.test_score}


def collect() -> Cells:
    """Every cell, from the file or run now."""
    known: Cells = {}
    if RESULTS.exists():
        for row in map(json.loads, RESULTS.read_text().splitlines()):
            known[row["instance"], row["plan"], row["rng_seed"]] = row
    for number in sorted(range(INSTANCES), key=lambda number: number * 7 % INSTANCES):
        instance = drawn(number)
        for plan in dict.fromkeys(possible(plan, instance) for plan in PLANS):
            for rng_seed in (*CHOOSING, *REPORTING):
                key = (number, plan, rng_seed)
                if key not in known:
                    known[key] = run(instance, plan, rng_seed)
                    place = {"instance": number, "plan": plan, "rng_seed": rng_seed}
                    with RESULTS.open("a") as file:
                        file.write(json.dumps(place | known[key]) + "\n")
    return known


def scores(known: Cells, number: int, part: str, rng_seeds: tuple[int, ...]) -> dict[str, float]:
    """Mean lead over the twin by plan."""

    def lead(plan: str, rng_seed: int) -> float:
        grown = known[number, possible(plan, drawn(number)), rng_seed]
        return 100 * (known[number, "", rng_seed][part] - grown[part])

    return {plan: fmean(lead(plan, rng_seed) for rng_seed in rng_seeds) for plan in PLANS}


def table(known: Cells) -> str:
    """Instances with their best plans, and the headroom."""
    numbers = [n for n in range(INSTANCES) if (n, possible(PLANS[-1], drawn(n)), REPORTING[-1]) in known]
    choosing = {n: scores(known, n, "val", CHOOSING) for n in numbers}
    reporting = {n: scores(known, n, "test", REPORTING) for n in numbers}
    own = {n: max(PLANS, key=choosing[n].__getitem__) for n in numbers}
    of_all = {plan: fmean(choosing[n][plan] for n in numbers) for plan in PLANS}
    one = max(PLANS, key=of_all.__getitem__)
    lines = [
        "| widths | kernel | slots | rate | data | MFLOP | best plan | its score"
        f" | {one or 'never'} | a0 b1 c2 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for n in numbers:
        i, found = drawn(n), reporting[n]
        slots = "".join(name for name, enabled in zip(SLOTS, i.enabled, strict=True) if enabled)
        lines.append(
            f"| {'-'.join(map(str, i.widths))} | {i.kernel} | {slots} | {i.learning_rate:g}"
            f" | {i.data_share:g} | {(TASK.budget_of(i) or 0) / 1e6:.0f} | {possible(own[n], i) or 'never'}"
            f" | {found[own[n]]:+.1f} | {found[one]:+.1f} | {found['a0 b1 c2']:+.1f} |"
        )
    gains = [reporting[n][own[n]] - reporting[n][one] for n in numbers]
    gain, error = fmean(gains), stdev(gains) / math.sqrt(len(gains))
    best, shared = fmean(reporting[n][own[n]] for n in numbers), fmean(reporting[n][one] for n in numbers)
    plans = ", ".join(f"{p or 'never'} {fmean(reporting[n][p] for n in numbers):+.1f}" for p in PLANS)
    lines += [
        "",
        f"Best plan per instance {best:+.1f}, one best plan for all ({one or 'never'}) {shared:+.1f}:"
        f" headroom {gain:.1f} ± {error:.1f}, {gain / error:.1f} standard errors of {len(gains)} instances.",
        "",
        f"Every plan for all: {plans}.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with one_thread():
        text = table(collect())
    (HERE / "table.md").write_text(text)
    print(text)
