"""The plan for all instances: the last stage of its search.

The first stage is 019-headroom's: 12 plans on 24 instances and the two rng seeds that choose, 576 episodes.
Here its best four, changes of its best and ``never`` are run on 48 instances as the mixture draws them, 480
episodes. That is 1,056 in all; a training of the preset ``mixture`` uses 960. The plan with the highest mean
validation score is ``schedule``.

Run with ``.venv/bin/python experiments/020-mixture/schedule.py`` (about four minutes of one core); it goes on
where it stopped and rewrites schedule.md beside this file.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean, stdev

from arms import EpisodeTree, planned

from esper.run.factories import one_thread
from esper.tolaria.seeding import SELECTION_SEEDS

HERE = Path(__file__).parent
RESULTS = HERE / "schedule.jsonl"
RNG_SEED, EPISODES = SELECTION_SEEDS[600_000], 48
PLANS = ("", "b0", "b0 c3", "b0 c1", "b1", "b0 c2", "b0 c4", "b0 c5", "b1 c3", "b0 a3")
Rows = dict[tuple[str, int], float]
"""Scores on the validation split by plan and episode: 100 · log(loss of the ungrown twin / loss)."""


def known() -> Rows:
    rows = map(json.loads, RESULTS.read_text().splitlines()) if RESULTS.exists() else ()
    return {(row["plan"], row["episode"]): row["score"] for row in rows}


def mean_score(rows: Rows, plan: str) -> float:
    return fmean(rows[plan, episode] for episode in range(EPISODES))


def best_plan() -> str:
    """The plan that was found; the search must have been run."""
    rows = known()
    return max(PLANS, key=lambda plan: mean_score(rows, plan))


def search() -> Rows:
    rows = known()
    for episode in range(EPISODES):
        if all((plan, episode) in rows for plan in PLANS):
            continue
        tree = EpisodeTree(RNG_SEED, episode)
        losses = {plan: tree.run(planned(tree.space, plan)).val_loss for plan in PLANS}
        with RESULTS.open("a") as file:
            for plan, loss in losses.items():
                rows[plan, episode] = 100 * math.log(losses[""] / loss)
                row = {"plan": plan, "episode": episode, "score": rows[plan, episode]}
                file.write(json.dumps(row) + "\n")
    return rows


def table(rows: Rows) -> str:
    best = best_plan()
    lines = ["| plan | score | ahead of the best by |", "|---|---|---|"]
    for plan in sorted(PLANS, key=lambda plan: -mean_score(rows, plan)):
        ahead = [rows[plan, e] - rows[best, e] for e in range(EPISODES)]
        error = stdev(ahead) / math.sqrt(EPISODES)
        said = "" if plan == best else f"{fmean(ahead):+.1f} ± {error:.1f}"
        lines.append(f"| {plan or 'never'} | {mean_score(rows, plan):+.1f} | {said} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with one_thread():
        text = table(search())
    (HERE / "schedule.md").write_text(text)
    print(text)
