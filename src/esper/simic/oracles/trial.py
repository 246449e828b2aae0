"""Whole training runs on oracle environments, in seconds: does a learner find the known optimum?

Three sets of environments never meet: those that are trained on, those that say when to stop, and
those whose return is reported.
"""

from dataclasses import asdict, dataclass
from typing import Final

import torch

from esper.leyline import Head, SlotConfig, derive_seed
from esper.simic.agent.ppo import PPOAgent
from esper.simic.oracles.toy_envs import NUM_SLOTS, Oracle
from esper.simic.training.rollout import ActionStreams, collect, evaluate
from esper.simic.training_config import PPOConfig
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCritic, PolicyShape
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.distributions import MaskedCategorical
from esper.tamiyo.policy.observation_features import get_feature_size

OracleClass = type[Oracle]

SMALL: Final = PolicyShape(
    get_feature_size(SlotConfig.of_count(NUM_SLOTS)), NUM_SLOTS, feature_dim=64, hidden_dim=64
)
"""A network that learns every oracle on one core in seconds."""
TRAINED_ENVS: Final = 32
EVALUATED_ENVS: Final = 64
ARRIVED: Final = 0.97
ITERATIONS_BETWEEN_CHECKS: Final = 5


@dataclass(frozen=True, slots=True)
class Trial:
    """What one training run came to; returns are means over episodes."""

    evaluation: float
    """Of argmax decisions in environments that the run has not met before."""
    chance: float
    """Of uniform legal actions."""
    optimum: float
    iterations: int

    @property
    def share(self) -> float:
        """How much of the way from chance to the optimum was covered; noise may carry it past 1."""
        return (self.evaluation - self.chance) / (self.optimum - self.chance)


def train_on(oracle: OracleClass, rng_seed: int, iterations: int, *, shape: PolicyShape = SMALL) -> Trial:
    """Train a new policy on ``oracle`` until ``iterations`` are over or it has arrived.

    It has when its share reaches ``ARRIVED`` in two checks in a row: once may be luck.
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
    """A network whose initial weights depend on ``rng_seed`` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(rng_seed, "policy"))
        return FactoredRecurrentActorCritic(**asdict(shape))


def random_return(oracle: OracleClass, rng_seed: int, num_envs: int = 128) -> float:
    """Mean return of one episode of uniform legal actions in each of ``num_envs`` environments."""
    env = oracle(derive_seed(rng_seed, "chance"), range(num_envs))
    streams = ActionStreams(derive_seed(rng_seed, "chance"), range(num_envs))
    masks, total = env.reset().masks, 0.0
    for _ in range(env.horizon):
        step = env.step(uniform_actions(masks, streams.draw()).numpy())
        masks, total = step.observation.masks, total + float(step.reward.mean())
    return total


def uniform_actions(masks: ActionMasks, uniforms: torch.Tensor) -> torch.Tensor:
    """Actions ``[env, 8]``: each head uniform over what the heads before it leave legal."""
    actions = torch.zeros(uniforms.shape, dtype=torch.int64)
    for head in Head:
        mask = masks.of_head(head, actions)
        masks.check(head, mask)
        flat = MaskedCategorical(torch.zeros(mask.shape), mask)
        actions[:, head] = flat.sample(uniforms[:, head])
    return actions
