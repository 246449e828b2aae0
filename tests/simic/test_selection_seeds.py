import pytest

from esper.simic.config import TrainingConfig
from esper.simic.training.policy_env import GrowthEnv
from esper.simic.training.rollout import evaluate
from esper.simic.training.trainer import Trainer
from tests.simic.episodes import task_with


def test_evaluation_of_a_policy_uses_selection_rng_seeds_and_not_the_training_rng_seeds() -> None:
    task = task_with(horizon=2)
    config = TrainingConfig(rng_seed=3, envs=2, evaluate_episodes=2, hidden_dim=16, reward_family="loss")
    trainer = Trainer(task, config)

    def mean_return(rng_seed: int) -> float:
        env = GrowthEnv(task, config, rng_seed=rng_seed, env_indices=range(2))
        return float(evaluate(env, trainer.policy).mean())

    found = trainer.evaluate().mean_return
    assert found == pytest.approx(mean_return(1_000_003))
    assert found != pytest.approx(mean_return(3))
