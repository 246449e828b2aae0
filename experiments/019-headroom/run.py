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
from functools import cache
from pathlib import Path
from statistics import fmean, stdev

from esper.run.factories import one_thread
from esper.tamiyo import OffController, PeriodicController, parse_plan
from esper.tolaria.env import MorphEnv
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
PLANS = (*("", "b0", "b1", "b2", "b4", "c0"), *("b0 c1", "b2 c3", "b4 c5", "b0 c3", "a0 b1 c2", "b0 c1 a2"))
"""Slots from the input on, each with the step, of 8, before which its seed is planted; growth ends with step
6. What an instance has no slot for is left out."""


@cache
def drawn(number: int) -> Instance:
    """Instance ``number`` of the mixture, unlike those before it, with budgets spread evenly, not drawn."""
    shares = TASK.instances.budget_shares
    share = shares[number * len(shares) // INSTANCES]
    before = {drawn(earlier) for earlier in range(number)}
    generator = EpisodeStreams(1_500_000, 0, number).generator("instance")
    while (instance := replace(TASK.instances.draw(generator), budget_share=share)) in before:
        pass
    return instance


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


class Cells:
    """Losses by instance, plan and rng seed, on disk."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, str, int], dict[str, float]] = {}
        if RESULTS.exists():
            for row in map(json.loads, RESULTS.read_text().splitlines()):
                self.known[row["instance"], row["plan"], row["rng_seed"]] = row

    def get(self, number: int, plan: str, rng_seed: int) -> dict[str, float]:
        """One episode, from the file or run now."""
        instance = drawn(number)
        plan = possible(plan, instance)
        key = (number, plan, rng_seed)
        if key not in self.known:
            self.known[key] = run(instance, plan, rng_seed)
            place = {"instance": number, "plan": plan, "rng_seed": rng_seed}
            with RESULTS.open("a") as file:
                file.write(json.dumps(place | self.known[key]) + "\n")
        return self.known[key]

    def score(self, number: int, plan: str, part: str, rng_seeds: tuple[int, ...]) -> float:
        """Mean lead over the twin."""
        leads = [self.get(number, "", s)[part] - self.get(number, plan, s)[part] for s in rng_seeds]
        return 100 * fmean(leads)


def one_best_plan(cells: Cells) -> str:
    """The plan for all instances, by validation score on the rng seeds that choose."""
    return max(PLANS, key=lambda plan: fmean(cells.score(n, plan, "val", CHOOSING) for n in range(INSTANCES)))


def table(cells: Cells) -> str:
    """Instances with their best plans, and the headroom."""
    numbers = range(INSTANCES)
    choosing = {n: {plan: cells.score(n, plan, "val", CHOOSING) for plan in PLANS} for n in numbers}
    own = {n: max(PLANS, key=choosing[n].__getitem__) for n in numbers}
    of_all = {plan: fmean(choosing[n][plan] for n in numbers) for plan in PLANS}
    one = one_best_plan(cells)
    lines = [
        "| widths | kernel | slots | rate | data | MFLOP | minibatches | best plan | its score"
        f" | {one or 'never'} |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    best, shared = [], []
    for n in numbers:
        i = drawn(n)
        best.append(cells.score(n, own[n], "test", REPORTING))
        shared.append(cells.score(n, one, "test", REPORTING))
        slots = "".join(name for name, enabled in zip(SLOTS, i.enabled, strict=True) if enabled)
        bought = MorphEnv(point(i), rng_seed=0).reset().minibatches_left
        lines.append(
            f"| {'-'.join(map(str, i.widths))} | {i.kernel} | {slots} | {i.learning_rate:g}"
            f" | {i.data_share:g} | {(TASK.budget_of(i) or 0) / 1e6:.0f} | {bought:.0f}"
            f" | {possible(own[n], i) or 'never'} | {best[-1]:+.1f} | {shared[-1]:+.1f} |"
        )
    gains = [mine - ours for mine, ours in zip(best, shared, strict=True)]
    gain, error = fmean(gains), stdev(gains) / math.sqrt(len(gains))
    lines += [
        "",
        f"Best plan per instance {fmean(best):+.1f}, one best plan for all ({one or 'never'})"
        f" {fmean(shared):+.1f}: headroom {gain:.1f} ± {error:.1f}, {gain / error:.1f} standard errors of"
        f" {len(gains)} instances.",
        "",
        "Validation score of every plan for all, on the rng seeds that choose: "
        + ", ".join(f"{plan or 'never'} {value:+.1f}" for plan, value in of_all.items())
        + ".",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with one_thread():
        text = table(Cells())
    (HERE / "table.md").write_text(text)
    print(text)
