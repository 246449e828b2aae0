"""The learning agent: rollouts and PPO updates."""
