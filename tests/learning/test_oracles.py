"""A policy learns every oracle with one set of hyper-parameters: the defaults."""

from dataclasses import replace

import pytest

from esper.simic.oracles.lifecycle_envs import Lifecycle, Scaffold
from esper.simic.oracles.toy_envs import Bandit, Combination, Distractors, Memory, Rent, Timing
from esper.simic.oracles.trial import SMALL, OracleClass, train_on

RNG_SEEDS = range(3)

SLOW = pytest.mark.slow
REQUIRED = [
    # oracle, iterations at most, share of the way from chance to the optimum
    (Bandit, 40, 0.95),
    (Timing, 60, 0.95),
    (Rent, 60, 0.95),
    (Distractors, 60, 0.95),
    (Combination, 100, 0.90),
    pytest.param(Memory, 100, 0.90, marks=SLOW),
    pytest.param(Lifecycle, 60, 0.90, marks=SLOW),
    pytest.param(Scaffold, 100, 0.90, marks=SLOW),
]


@pytest.mark.parametrize("rng_seed", RNG_SEEDS)
@pytest.mark.parametrize(("oracle", "iterations", "share"), REQUIRED)
def test_the_policy_finds_the_optimum(
    oracle: OracleClass, iterations: int, share: float, rng_seed: int
) -> None:
    trial = train_on(oracle, rng_seed, iterations)
    assert trial.share >= share, trial


@pytest.mark.slow
def test_memory_needs_the_recurrence() -> None:
    trial = train_on(Memory, 0, 50, shape=replace(SMALL, recurrent=False))
    assert trial.share < 0.3, trial


@pytest.mark.parametrize("rng_seed", RNG_SEEDS)
def test_combination_needs_heads_that_see_the_op(rng_seed: int) -> None:
    # Blind to the op, one slot of three fits one op of three, and one blueprint of three the slot: 1/3.
    trial = train_on(Combination, rng_seed, 40, shape=replace(SMALL, conditioned=False))
    assert trial.share < 0.2, trial
