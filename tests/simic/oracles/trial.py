"""Short trainings on oracle environments, which show whether PPO reaches the known best return.

Training, early stopping and the reported return each use their own set of environments.
"""

from dataclasses import asdict, dataclass
from typing import Final

import torch

from esper.leyline import Head, SlotConfig, derive_seed
from esper.simic.agent.ppo import PPOAgent
from esper.simic.config import PPOConfig
from esper.simic.training.rollout import ActionStreams, collect, evaluate
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCritic, PolicyShape
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.distributions import MaskedCategorical
from esper.tamiyo.policy.features import get_feature_size
from tests.simic.oracles.toy_envs import NUM_SLOTS, Oracle

OracleClass = type[Oracle]

SMALL: Final = PolicyShape(
    get_feature_size(SlotConfig.of_count(NUM_SLOTS)), NUM_SLOTS, feature_dim=64, hidden_dim=64
)
"""Sizes of a policy network that learns every oracle on one core in seconds."""
TRAINED_ENVS: Final = 32
EVALUATED_ENVS: Final = 64
ARRIVED: Final = 0.97
ITERATIONS_BETWEEN_CHECKS: Final = 5


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of one training on an oracle; returns are means over episodes."""

    evaluation: float
    """Mean return of the trained policy's argmax actions, in environments that were not used in training."""
    chance: float
    """Mean return of uniformly random legal actions."""
    optimum: float
    iterations: int

    @property
    def share(self) -> float:
        """Share of the best return: (evaluation − chance) / (optimum − chance); noise can lift it above 1."""
        return (self.evaluation - self.chance) / (self.optimum - self.chance)


def train_on(oracle: OracleClass, rng_seed: int, iterations: int, *, shape: PolicyShape = SMALL) -> Trial:
    """Train a new policy on ``oracle`` and evaluate it in new environments of that oracle.

    Training stops early when ``Trial.share`` is at least ``ARRIVED`` in two checks in a row.

    Args:
        oracle: Class of the oracle environments.
        rng_seed: Root of all random streams.
        iterations: Largest number of training iterations.
        shape: Sizes of the policy network.
    """
    policy = new_policy(shape, rng_seed)
    agent = PPOAgent(policy, PPOConfig(), envs_per_backward=TRAINED_ENVS)
    env = oracle(rng_seed, range(TRAINED_ENVS))
    rehearsal = oracle(derive_seed(rng_seed, "rehearsal"), range(EVALUATED_ENVS))
    streams = ActionStreams(rng_seed, range(TRAINED_ENVS))
    chance, finished, arrived = random_return(oracle, rng_seed), 0, 0
    while finished < iterations and arrived < 2:
        agent.update(collect(env, policy, streams), finished / iterations)
        finished += 1
        if finished % ITERATIONS_BETWEEN_CHECKS == 0:
            reached = Trial(evaluate(rehearsal, policy).mean(), chance, oracle.optimum, finished)
            arrived = arrived + 1 if reached.share >= ARRIVED else 0
    unseen = oracle(derive_seed(rng_seed, "evaluation"), range(EVALUATED_ENVS))
    return Trial(evaluate(unseen, policy).mean(), chance, oracle.optimum, finished)


def new_policy(shape: PolicyShape, rng_seed: int) -> FactoredRecurrentActorCritic:
    """Return a policy network whose initial weights depend on ``rng_seed`` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(rng_seed, "policy"))
        return FactoredRecurrentActorCritic(**asdict(shape))


def random_return(oracle: OracleClass, rng_seed: int, num_envs: int = 128) -> float:
    """Return the mean return of uniform legal actions, one episode in each of ``num_envs`` environments."""
    env = oracle(derive_seed(rng_seed, "chance"), range(num_envs))
    streams = ActionStreams(derive_seed(rng_seed, "chance"), range(num_envs))
    masks, total = env.reset().masks, 0.0
    for _ in range(env.horizon):
        step = env.step(uniform_actions(masks, streams.draw()).numpy())
        masks, total = step.observation.masks, total + float(step.reward.mean())
    return total


def uniform_actions(masks: ActionMasks, uniforms: torch.Tensor) -> torch.Tensor:
    """Return actions ``[env, head]``, each head uniform over its legal values given the heads before it."""
    actions = torch.zeros(uniforms.shape, dtype=torch.int64)
    for head in Head:
        mask = masks.of_head(head, actions)
        masks.check(head, mask)
        flat = MaskedCategorical(torch.zeros(mask.shape), mask)
        actions[:, head] = flat.sample(uniforms[:, head])
    return actions
