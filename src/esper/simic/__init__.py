"""Reinforcement learning of a policy: rewards, PPO, the training loop."""
