import pytest
import torch

from esper.simic.agent.ppo import PPOAgent
from esper.simic.config import PPOConfig
from esper.simic.training.proving import new_policy
from tests.simic.rolling import TINY


def test_the_policy_s_first_step_is_that_of_adam_with_an_epsilon_of_1e_minus_5() -> None:
    """Adam moves a weight by lr · g / (|g| + eps) at first: tiny gradients move it less than large ones.

    An epsilon of 1e-8, torch's own, would let noise of 1e-6 move the weights at the full rate.
    """
    agent = PPOAgent(new_policy(TINY, 0), PPOConfig(learning_rate=0.01))
    weights = list(agent.policy.parameters())
    before = [weight.detach().clone() for weight in weights]
    for weight in weights:
        weight.grad = torch.full_like(weight, 1e-6)
    agent.optimiser.step()
    moved = torch.cat([(old - new.detach()).flatten() for old, new in zip(before, weights, strict=True)])
    assert moved.mean().item() == pytest.approx(0.01 * 1e-6 / (1e-6 + 1e-5), rel=1e-2)
