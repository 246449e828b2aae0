"""A policy learns every oracle environment with the default hyper-parameters."""

from dataclasses import replace

import pytest

from tests.simic.oracles.lifecycle_envs import Lifecycle, Scaffold
from tests.simic.oracles.toy_envs import Bandit, Combination, Distractors, Memory, Rent, Timing
from tests.simic.oracles.trial import SMALL, OracleClass, train_on

RNG_SEEDS = range(3)

SLOW = pytest.mark.slow
REQUIRED = [
    # Columns: oracle, number of iterations, required share of the best return (0: uniform actions, 1: best).
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
def test_trained_policy_reaches_the_required_share_of_the_optimal_return(
    oracle: OracleClass, iterations: int, share: float, rng_seed: int
) -> None:
    trial = train_on(oracle, rng_seed, iterations)
    assert trial.share >= share, trial


@pytest.mark.slow
def test_policy_without_recurrence_does_not_solve_the_memory_oracle() -> None:
    trial = train_on(Memory, 0, 50, shape=replace(SMALL, recurrent=False))
    assert trial.share < 0.3, trial


@pytest.mark.parametrize("rng_seed", RNG_SEEDS)
def test_policy_whose_action_heads_ignore_op_and_slot_does_not_solve_the_combination_oracle(
    rng_seed: int,
) -> None:
    # An action head without the op as input guesses one of three slots or blueprints: expected return 1/3.
    trial = train_on(Combination, rng_seed, 40, shape=replace(SMALL, conditioned=False))
    assert trial.share < 0.2, trial
