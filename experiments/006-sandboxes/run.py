"""What of the learner is needed where the optimum is known? Every oracle, every variant, three rng seeds.

A share is how much of the way from chance to the optimum a policy covers in environments it has not
met: 100 is the optimum. All variants have the default hyper-parameters and the same number of iterations.

Run with ``.venv/bin/python experiments/006-sandboxes/run.py`` (about twenty minutes on two cores); name
variants to run only those. It rewrites results.json and table.md beside this file.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from esper.leyline import HEAD_NAMES
from esper.tamiyo.networks.factored_lstm import PolicyShape

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.simic.oracles.lifecycle_envs import Lifecycle, Scaffold
from tests.simic.oracles.toy_envs import Bandit, Combination, Distractors, Memory, Rent, Timing
from tests.simic.oracles.trial import SMALL, OracleClass, train_on

HERE = Path(__file__).parent
RNG_SEEDS = range(3)
ITERATIONS: dict[OracleClass, int] = {
    Bandit: 40,
    Timing: 60,
    Memory: 100,
    Combination: 100,
    Rent: 60,
    Distractors: 60,
    Lifecycle: 60,
    Scaffold: 100,
}
WIDE = replace(SMALL, feature_dim=256, hidden_dim=256)


def forget_bias_of_one(bias: Tensor, hidden: int) -> None:
    bias[hidden : 2 * hidden] = 1.0


def every_row(masks: Tensor, sizes: object) -> Tensor:
    return torch.ones(masks.shape[:2], dtype=torch.bool)


@dataclass(frozen=True)
class Variant:
    """A network, and what is done to the learner while it is trained."""

    shape: PolicyShape
    oracles: tuple[OracleClass, ...] = tuple(ITERATIONS)
    patched: Callable[[], AbstractContextManager[object]] = field(default=nullcontext)


VARIANTS: dict[str, Variant] = {
    "256 wide, V(s)": Variant(WIDE),
    "64 wide, V(s)": Variant(SMALL),
    "64 wide, Q(s, op)": Variant(replace(SMALL, critic="op_value")),
    "64 wide, independent heads": Variant(replace(SMALL, conditioned=False)),
    "64 wide, no memory": Variant(replace(SMALL, recurrent=False)),
    "64 wide, forget bias 1": Variant(
        SMALL, patched=lambda: patch("esper.tamiyo.networks.factored_lstm._chrono_init", forget_bias_of_one)
    ),
    "64 wide, means over all rows": Variant(
        SMALL, patched=lambda: patch("esper.simic.agent.ppo.has_choice", every_row)
    ),
    **{
        f"64 wide, {head} held": Variant(replace(SMALL, hold_heads=(head,)), oracles=(Lifecycle,))
        for head in HEAD_NAMES
        if head != "op"
    },
}


def share(variant: str, oracle: OracleClass, rng_seed: int) -> float:
    """One training; needs a process of its own, since it may patch the learner."""
    torch.set_num_threads(1)
    with VARIANTS[variant].patched():
        return train_on(oracle, rng_seed, ITERATIONS[oracle], shape=VARIANTS[variant].shape).share


def table(results: dict[str, dict[str, list[float]]]) -> str:
    """Mean share and, in brackets, the worst of the three."""
    names = [oracle.__name__ for oracle in ITERATIONS]
    lines = [f"| variant | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for variant, shares in results.items():
        cells = [
            f"{100 * sum(found) / len(found):.0f} ({100 * min(found):.0f})"
            if (found := shares.get(name))
            else ""
            for name in names
        ]
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    kept = HERE / "results.json"
    results: dict[str, dict[str, list[float]]] = json.loads(kept.read_text()) if kept.exists() else {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        for variant in sys.argv[1:] or list(VARIANTS):
            jobs = {
                oracle.__name__: [pool.submit(share, variant, oracle, rng_seed) for rng_seed in RNG_SEEDS]
                for oracle in VARIANTS[variant].oracles
            }
            results[variant] = {name: [job.result() for job in found] for name, found in jobs.items()}
            ordered = {name: results[name] for name in VARIANTS if name in results}
            kept.write_text(json.dumps(ordered, indent=1) + "\n")
            (HERE / "table.md").write_text(table(ordered))
            print(variant, results[variant], flush=True)
    print(table({name: results[name] for name in VARIANTS if name in results}))


if __name__ == "__main__":
    main()
