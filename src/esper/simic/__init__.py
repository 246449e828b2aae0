"""Selection pressure: rewards, PPO, the training loop."""
