"""What changes for the learner with the number of slots? 1, 3 and 8 of them, the same settings.

Three kinds of numbers: how far the slot head's entropy falls when one slot is preferred a little, how
often a slot is tried in an iteration, and what a short training does to the entropy.

Run with ``.venv/bin/python experiments/007-slots/run.py`` (about three minutes on one core); it rewrites
table.md beside this file.
"""

from __future__ import annotations

from pathlib import Path

import torch

from esper.leyline import Head, LifecycleOp
from esper.run.policy_training import task_of
from esper.run.run_config import TrainingConfig
from esper.simic.training.trainer import Iteration, Trainer
from esper.tamiyo.policy.distributions import MaskedCategorical

HERE = Path(__file__).parent
COUNTS = (1, 3, 8)
RNG_SEEDS = range(3)
PREFERENCE = 1.0
"""Logit by which one slot is ahead of the others: probabilities of e to 1."""
SETTINGS = {"envs": 8, "iterations": 6, "steps": 8, "evaluate_every": 6, "evaluate_episodes": 1}


def entropy_of_preference(count: int) -> float:
    """Normalised entropy of a slot head that prefers one slot by ``PREFERENCE``."""
    logits = torch.zeros(1, count)
    logits[0, 0] = PREFERENCE
    return MaskedCategorical(logits, torch.ones(1, count, dtype=torch.bool)).entropy().item()


def train(count: int, rng_seed: int) -> tuple[list[Iteration], float]:
    """The iterations of a short training, and how often one slot was germinated in its first iteration."""
    config = TrainingConfig(slots=count, rng_seed=rng_seed, **SETTINGS)
    trainer = Trainer(task_of(config), config)
    iterations = [trainer.run_iteration() for _ in range(config.iterations)]
    decisions = config.envs * trainer.task.horizon
    return iterations, decisions * iterations[0].op_shares[LifecycleOp.GERMINATE] / count


def mean(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.2f}" if known else "no choice"


def main() -> None:
    torch.set_num_threads(1)
    lines = [
        "| slots | entropy, all slots alike | one ahead by 1 | after 6 iterations | gradient norm, slot head"
        " | germinations per slot in the first iteration |",
        "|---|---|---|---|---|---|",
    ]
    for count in COUNTS:
        trainings = [train(count, rng_seed) for rng_seed in RNG_SEEDS]
        runs = [[summary.metrics for summary in iterations] for iterations, _ in trainings]
        lines.append(
            f"| {count} | {mean([run[0].head_entropy[Head.SLOT] for run in runs])}"
            f" | {'no choice' if count == 1 else f'{entropy_of_preference(count):.2f}'}"
            f" | {mean([run[-1].head_entropy[Head.SLOT] for run in runs])}"
            f" | {mean([row.head_grad_norm[Head.SLOT] for run in runs for row in run])}"
            f" | {mean([tries for _, tries in trainings])} |"
        )
    table = "\n".join(lines) + "\n"
    (HERE / "table.md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
