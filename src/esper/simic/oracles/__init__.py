"""Oracle environments, whose best return is known, for tests, experiments and benchmarks of PPO."""
